"""Copies of snapshots in the memory of another node, for the loss of this one."""
