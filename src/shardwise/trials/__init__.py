"""Strategies side by side on this machine: each run for a few steps, predicted and measured."""
