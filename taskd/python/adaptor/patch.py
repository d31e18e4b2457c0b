"""Importing this module installs taskd into torchrun, if TASKD_PROCESS_ENABLE is on.

Fixed path, no content of its own.
"""

from taskd.python.adaptor.handler import install as install  # noqa: PLC0414

install()
