"""The local page in a browser: plan, watch and compare runs, read findings of `check`."""
