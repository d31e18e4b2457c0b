"""Marks of the training thread and calls of collectives, as lines in files."""
