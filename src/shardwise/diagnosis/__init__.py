"""Whether this machine can train: checks as values, each with its finding and how to fix it."""
