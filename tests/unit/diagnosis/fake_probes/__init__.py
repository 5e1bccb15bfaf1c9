"""Probes that answer at once, hang or crash: `python -m fake_probes EVENTS PROBE...`."""
