"""What happens in the launching process, before, during and after a run."""
