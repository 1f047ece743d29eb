"""What several tasks share, and the stand-ins for machines without a GPU."""
