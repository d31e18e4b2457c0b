"""Compatibility veneer: the path under which libtaskd.so is looked for."""
