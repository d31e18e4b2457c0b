"""Importing this module installs taskd into torchrun, if TASKD_PROCESS_ENABLE is on.

Fixed path, no content of its own.
"""

import logging


def install() -> bool:
    """True if the seams are in place. Never raises: torchrun must start."""
    try:
        from taskd.config import is_patch_enabled  # noqa: PLC0415

        if not is_patch_enabled():
            return False
        from taskd.torchrun import patch  # noqa: PLC0415

        patch.apply()
    except Exception:  # the veneer: a failure here is logged and torchrun goes on as it is
        logging.getLogger("taskd").exception(
            "taskd is not installed into this torchrun, which runs without it"
        )
        return False
    return True


install()
