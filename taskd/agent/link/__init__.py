"""The connection of one process to the manager."""
