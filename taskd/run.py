"""`python -m taskd.run`: torchrun with the patch, and no edited file.

Takes torchrun's own arguments.
"""

import os
import sys

from taskd.config.names import PROCESS_ENABLE_ENV
from taskd.errors import MissingTorchError
from taskd.extras import require_torch
from taskd.python.adaptor import patch


def main(arguments: list[str] | None = None) -> None:
    """Run torchrun. taskd is on unless TASKD_PROCESS_ENABLE says otherwise."""
    try:
        require_torch()
    except MissingTorchError as error:
        sys.exit(f"{error}; a training without torch: python -m taskd.rerun -- COMMAND")
    os.environ.setdefault(PROCESS_ENABLE_ENV, "on")
    patch.install()
    from torch.distributed import run as torchrun  # noqa: PLC0415

    torchrun.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
