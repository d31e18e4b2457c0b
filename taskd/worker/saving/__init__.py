"""Copies of the state that outlive the process: snapshots and checkpoints."""
