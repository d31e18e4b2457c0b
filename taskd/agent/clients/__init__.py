"""Agents without workers of their own: callbacks of another launcher, and the relay of a node."""
