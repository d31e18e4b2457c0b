"""What several files of process tests compare with.

Computed once, also where several processes run the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_recovery import check_recovered

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path
) -> Callable[[str], dict[int, str]]:
    """Digest of each rank in a run of sharded.py without faults, by layout."""

    def digests(layout: str) -> dict[int, str]:
        def train() -> dict[int, str]:
            with harness.job(tmp_path_factory.mktemp("undisturbed"), LAYOUT=layout) as job:
                finished = job.run("sharded.py")
                check_recovered(job, finished, job.digests(), faults=0, replaced=set())
                return job.digests()

        known = {
            int(rank): digest
            for rank, digest in harness.once(shared_folder, f"sharded {layout}", train).items()
        }
        assert sorted(known) == [0, 1, 2, 3]
        return known

    return digests
