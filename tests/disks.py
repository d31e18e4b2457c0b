"""File systems of a test's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


def fill(folder: pathlib.Path) -> pathlib.Path:
    """Leave no space on the file system of a folder. Returns the file that has it."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(b"x" * 4096)
    return path


def small_disk(
    path: pathlib.Path, kilobytes: int, *options: str
) -> contextlib.AbstractContextManager[None]:
    """A file system of its own. Needs root."""
    path.mkdir(exist_ok=True)
    every = ",".join((f"size={kilobytes}k", *options))
    return _mounted(path, "-t", "tmpfs", "-o", every, "tmpfs")


def undeletable(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """A folder that not even root can rename or delete. Needs root."""
    return _mounted(path, "--bind", str(path))


@contextlib.contextmanager
def _mounted(path: pathlib.Path, *arguments: str) -> Iterator[None]:
    command = ["mount", *arguments, str(path)]
    if (
        os.geteuid() != 0
        or subprocess.run(command, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
