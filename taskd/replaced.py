"""A file that another process reads: it is replaced as a whole, or stays as it is."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_MODE = 0o644


@contextmanager
def replaced(target: Path) -> Iterator[TextIO]:
    """A text file to write, which takes the place of `target` if the block ends well.

    Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
            os.fchmod(descriptor, _MODE)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
