"""What the processes of a run share, beside the weights."""
