"""One TrainState in one entry of the function, and what follows its steps."""
