"""What the verbs and the Python API call: each function does one job from start to end."""
