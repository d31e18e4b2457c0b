"""The rules by which the machines decide. Each knows data and durations, and no machine's state."""
