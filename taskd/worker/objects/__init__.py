"""The user's objects and torch's tensors: what they are, where they lie, how they are put back."""
