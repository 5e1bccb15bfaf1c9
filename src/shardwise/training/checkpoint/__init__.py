"""Checkpoints: saved all or nothing, verified before they are trusted."""
