"""For a torch whose `distributed/run.py` was edited for Elastic Agent (`import mindx_elastic.api`).

What Elastic Agent did there, TaskD does: the import hands over to TaskD's patch, which does nothing
unless TASKD_PROCESS_ENABLE is `on`. Where TaskD is not installed, torchrun stays as it is.
"""

import importlib
import logging

_log = logging.getLogger(__name__)


def patch_torch_methods() -> bool:
    """Install TaskD's patch of torchrun. False: TaskD is not installed, and the log says so."""
    try:
        importlib.import_module("taskd.python.adaptor.patch")
    except ImportError as error:
        _log.warning(
            "torchrun is left as it is: mindx_elastic.api hands over to taskd, which cannot be "
            "imported: %s",
            error,
        )
        return False
    return True


patch_torch_methods()
