"""The runtime inside a training process: interrupts, parked state, re-entry."""
