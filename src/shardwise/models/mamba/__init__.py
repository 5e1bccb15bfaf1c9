"""Mamba-1 for training: transformers' modules and names, our arithmetic, the authors' initialisation."""
