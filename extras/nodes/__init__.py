"""Searchers on other machines (--ray): how they join, what a node is, and who brings it weights."""
