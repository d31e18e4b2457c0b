"""Tests of libtaskd and its Python side, with real processes."""
