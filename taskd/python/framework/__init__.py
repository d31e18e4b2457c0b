"""Compatibility veneer: paths of what frameworks' own launchers import."""
