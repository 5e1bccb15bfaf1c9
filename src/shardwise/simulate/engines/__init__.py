"""What each engine keeps on a GPU and on the host, and when; constants with their sources."""
