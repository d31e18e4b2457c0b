"""The runtime of the process: what the agent says, what it is told, interrupts, groups."""
