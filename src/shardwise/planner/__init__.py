"""The plan of a job on a hardware: traced, simulated, searched, and kept on disk."""
