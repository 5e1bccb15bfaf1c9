"""What a training step does to a GPU's memory and time, computed without one."""
