"""MindSpore under TaskD, on real MindSpore: `make test-mindspore`."""
