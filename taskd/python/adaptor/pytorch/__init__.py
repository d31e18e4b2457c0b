"""Names of TaskD for PyTorch that users import."""
