"""What taskd changes in torchrun: composition of the agent with torch's launcher. Imports torch."""
