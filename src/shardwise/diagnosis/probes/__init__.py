"""Questions that need torch, a GPU or the network, each asked in a process that may crash or hang."""
