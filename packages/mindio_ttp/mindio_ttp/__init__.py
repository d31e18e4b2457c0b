"""The names of MindIO TTP for training scripts, on taskd. See README.md of this package."""

__version__ = "0.1.0"
