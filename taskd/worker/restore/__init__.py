"""How the state comes to a new entry of the function."""
