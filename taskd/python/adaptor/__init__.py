"""Compatibility veneer: home of the patch module that torch's run.py imports."""
