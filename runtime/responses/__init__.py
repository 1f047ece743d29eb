"""Scores, samples and evaluations of responses."""
