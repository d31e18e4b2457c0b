"""What runs inside a training process, from its runtime up to the state that the user sees."""
