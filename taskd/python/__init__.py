"""Compatibility veneer: import and file paths that other systems rely on."""
