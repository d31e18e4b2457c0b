"""What is told of an exception of the script: its text, its signature, who caused it."""
