"""Folders of runs and benches: their schemas, writing them, reading them."""
