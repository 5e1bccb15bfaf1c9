"""Findings on other people's training setups: DeepSpeed JSON, accelerate configs, scripts, job files."""
