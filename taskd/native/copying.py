"""Copies of memory with a checksum in the same pass.

With libtaskd at the speed of memcpy, else with zlib at a tenth of that.

Knows addresses only; who calls answers for them. Both release the interpreter lock while they run.
A checksum says which of the two made it by its kind: readers need the same one.
"""

import ctypes
import zlib
from typing import Protocol

from taskd.native import library

LANES = 1  # taskd_checksum in csrc/checksum.c
CRC32 = 2


class Copier(Protocol):
    """One kind of checksum. The areas of a copy must not overlap."""

    kind: int

    def copy(self, destination: int, source: int, count: int) -> int:
        """Copy `count` bytes between two addresses; returns their checksum."""

    def checksum(self, source: int, count: int) -> int:
        """The checksum of `count` bytes at an address."""


class _Native:
    kind = LANES

    def __init__(self, binding: library.Binding) -> None:
        self.copy = binding.copy_checksummed
        self.checksum = binding.checksum


class _Zlib:
    kind = CRC32

    def copy(self, destination: int, source: int, count: int) -> int:
        if count:
            ctypes.memmove(destination, source, count)
        return self.checksum(destination, count)

    def checksum(self, source: int, count: int) -> int:
        return zlib.crc32((ctypes.c_char * count).from_address(source)) if count else 0


def copier() -> Copier:
    """The fastest one here."""
    binding = library.load()
    return _Zlib() if binding is None else _Native(binding)


def copier_of_kind(kind: int) -> Copier | None:
    """The one that a reader needs; None: it is not known, or needs libtaskd, which is not here."""
    if kind == CRC32:
        return _Zlib()
    found = copier()
    return found if found.kind == kind else None
