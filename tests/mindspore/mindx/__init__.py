"""Scripts of tests/mindspore/test_mindx_*.py, and what starts them."""
