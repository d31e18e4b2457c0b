"""How the workers of this node are: how far each has come, and how each process ended."""
