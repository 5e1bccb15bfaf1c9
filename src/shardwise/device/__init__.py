"""The seam to real GPUs: one file for each vendor's driver, none, and a replay of recorded readings."""
