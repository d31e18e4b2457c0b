"""Compatibility veneer: MindSpore's launcher."""
