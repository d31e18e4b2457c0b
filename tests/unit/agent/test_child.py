"""What a forked copy of the warm process has of its own."""

from __future__ import annotations

import contextlib
import gc
import os

from taskd.agent.spawning import child
from tests.descriptors import one_in_garbage


def test_what_was_inherited_closes_no_descriptor_of_its_own() -> None:
    """Garbage closed by its number what the copy had opened since."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            number = one_in_garbage()
            child.keep_only((writer,))
            own = [os.open(os.devnull, os.O_RDONLY) for _ in range(number)]
            gc.collect()
            lost = [descriptor for descriptor in own if not _is_open(descriptor)]
            os.write(writer, f"{number in own} {lost}".encode())
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, encoding="utf-8") as told:
        assert told.read() == "True []"
    os.waitpid(pid, 0)


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False
