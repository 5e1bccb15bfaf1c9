"""Starting and watching the worker processes of a run."""
