"""Side-by-side measurements against torchrun; never part of the tests."""
