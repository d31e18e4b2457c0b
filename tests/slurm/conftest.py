"""A Slurm for each of these tests. Where there can be none they are skipped, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed import slurm
from tests.process.test_recovery import reference as reference  # noqa: PLC0414
from tests.slurm.training import NODES, SPARES

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """One of its own for each test, in 2 s: nodes are lost in it."""
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm.Cluster(tmp_path_factory.mktemp("slurm"), NODES + SPARES) as found:
        yield found
