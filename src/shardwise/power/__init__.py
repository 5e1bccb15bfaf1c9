"""Power limits of GPUs: changed for a run, and always put back."""
