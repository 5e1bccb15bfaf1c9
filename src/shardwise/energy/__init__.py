"""Joules that training takes, measured where the driver can read them."""
