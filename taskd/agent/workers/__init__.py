"""The workers of this node as the agent's loop sees them: what is said to them and by them."""
