"""The operations whose speed or memory decides: each with a GPU side and a CPU side that agree."""
