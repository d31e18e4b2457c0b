"""Home of libtaskd.so, put here by the build."""
