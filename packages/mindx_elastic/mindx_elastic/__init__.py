"""Dying gasp for MindSpore and torch: what users of Elastic Agent import.

Importing the package, or any of its modules, loads neither MindSpore nor torch; what needs one of
them says so when it is used. Nothing outside of Python's own library is required.

    terminating_message      ExceptionCheckpoint: saves a MindSpore training that is ended
    restore_module           RestoreStrategyGenerator: which rank loads whose file
    torch_exception_module   exception_checkpoint: the same for torch
    api                      for a torch that was edited for Elastic Agent: hands over to taskd
"""

__version__ = "0.1.0"
