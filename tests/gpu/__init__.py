"""What needs an accelerator: `make test-gpu` on a machine with an NVIDIA GPU. One is enough."""
