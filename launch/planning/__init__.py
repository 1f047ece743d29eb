"""Whether a run fits into the memory of a machine."""
