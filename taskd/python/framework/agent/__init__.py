"""Compatibility veneer: agents."""
