"""The real training step of the real model, recorded without a GPU."""
