"""Python side of libtaskd: finding it, the black box of a worker, the death alarm."""
