"""Checkpoints: what is in one, and how it is written."""

FORMAT = 2  # of what is in one; this version of the project reads no other
