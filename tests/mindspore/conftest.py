"""Everything here needs MindSpore, and its own environment: elsewhere it is skipped."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import TYPE_CHECKING

import pytest

from tests import disks
from tests.mindspore.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is below this folder."""
    is_here = importlib.util.find_spec("mindspore") is not None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.mindspore)
            if not is_here:
                item.add_marker(pytest.mark.skip(reason="needs MindSpore: make test-mindspore"))


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk that a checkpoint of 60 MB does not fit on."""
    with disks.small_disk(tmp_path / "disk", 20_000):
        yield tmp_path / "disk"


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    """A job, of which nothing is left at the end."""
    one = Job(tmp_path)
    yield one
    one.check_nothing_is_left()
