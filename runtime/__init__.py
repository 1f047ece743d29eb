"""What keeps a run alive: processes, their signs of life, checkpoints, evaluation, what a person sees."""
