"""Tests that `make test` leaves out, and what proves the fact of each there: see tests/lanes.py.

Each module here has the tests of some files: patterns of names (fnmatch, with [[] for a bracket),
and what proves the same in `make test`.
"""

from __future__ import annotations

from tests.extended import others, recoveries, states, workers

EXTENDED: tuple[tuple[str, str], ...] = tuple(
    (f"{file}::{name}", proof)
    for module in (others, recoveries, states, workers)
    for file, tests in module.TESTS.items()
    for name, proof in tests.items()
)
