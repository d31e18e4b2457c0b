"""Which tests run when.

`make test`      everything that is not marked `extended`: at least one test on real processes for
                 each promise of the README, and all that needs no job
`make test-all`  everything
`.ci/run`        `make test`, and a slice of the extended ones that changes from commit to commit

Outside of all of these: tests marked `gpu`, and tests marked `slurm` (`make test-slurm`).

A test is extended because something in `make test` proves the same in another way. What that is,
its marker says: `@pytest.mark.extended("[3]")`, `marks=pytest.mark.extended("test_x.py: test_y")`;
without that, nothing is run. For older tests tests/extended says it. Where nothing proves all
of it, the reason names what comes nearest, after the word "nearest".
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.extended import EXTENDED
from tests.promises import PROMISES

if TYPE_CHECKING:
    from collections.abc import Iterable

# What shares expensive processes, or has read all sources, stays in one process of pytest-xdist:
# (fixture or file, group).
_GROUPS_BY_FIXTURE = {"world": "world"}
_GROUPS_BY_FILE = {
    "process/test_spawn.py": "spawn",
    "process/test_forkserver.py": "forkserver",
    "process/test_exchange.py": "exchange",
    "unit/test_layers.py": "sources",
    "unit/test_docs.py": "sources",
}


def mark(items: Iterable[pytest.Item]) -> set[str]:
    """Give each test its markers: `extended`, and the group that it must stay in.

    Returns patterns that fit no test. Raises UsageError for a test that is extended without a
    reason.
    """
    expressions = {pattern: re.compile(fnmatch.translate(pattern)) for pattern, _ in EXTENDED}
    any_of_them = re.compile("|".join(one.pattern for one in expressions.values()))
    proofs = dict(EXTENDED)
    unused = set(expressions)
    for item in items:
        _check_reasons(item)
        # most tests fit none, which one expression tells ten times sooner than hundreds
        if any_of_them.match(item.nodeid):
            fitting = [name for name, one in expressions.items() if one.match(item.nodeid)]
            unused -= set(fitting)
            item.add_marker(pytest.mark.extended("; ".join(proofs[name] for name in fitting)))
        for fixture, group in _GROUPS_BY_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(group))
        for file, group in _GROUPS_BY_FILE.items():
            if file in item.nodeid:
                item.add_marker(pytest.mark.xdist_group(group))
    return unused


def unproved(items: Iterable[pytest.Item]) -> set[str]:
    """Patterns of tests/promises.py that fit no test of `make test`; `items`: all, and marked."""
    names = [item.nodeid for item in items if item.get_closest_marker("extended") is None]
    patterns = {pattern for found in PROMISES.values() for pattern in found}
    return {pattern for pattern in patterns if not fnmatch.filter(names, pattern)}


def _check_reasons(item: pytest.Item) -> None:
    for marker in item.iter_markers("extended"):
        match marker.args:
            case (str(reason),) if reason.strip() and not marker.kwargs:
                continue
        raise pytest.UsageError(
            f"{item.nodeid} is marked `extended` without a reason. Write what proves the same in "
            '`make test`: @pytest.mark.extended("test_x.py: test_y"); see tests/lanes.py'
        )


class Slice:
    """Some of the extended tests, in an order that a text decides, for a limited time."""

    def __init__(self, seed: str, seconds: float) -> None:
        self._seed, self._seconds = seed, seconds
        self._deadline: float | None = None

    def pytest_report_header(self) -> str:
        """What to give to see the same again."""
        return f"slice of the extended tests: --slice {self._seed}, for {self._seconds:g} s"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the extended tests, in the order of this seed."""
        kept = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = sorted(
            kept, key=lambda item: hashlib.sha256(f"{self._seed} {item.nodeid}".encode()).digest()
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Start nothing more when the time is over, which begins with the first test.

        To find the tests may take longer than that: then none was run, and nothing failed.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
        if time.monotonic() > self._deadline:
            pytest.skip(f"the {self._seconds:g} s of this slice are over")
