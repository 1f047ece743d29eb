"""What keeps a run alive: processes, signs of life, checkpoints, evaluation, what a person sees."""
