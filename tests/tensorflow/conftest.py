"""TensorFlow or a reason; trainings in folders of their own; what all of them have to come to."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.tensorflow.training import Training, digest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def tensorflow() -> None:
    """`make test` runs where there is none."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:  # no origin: a folder of that name
        pytest.skip("tensorflow is not installed here: make test-tensorflow")


@pytest.fixture(scope="session")
def undisturbed(tensorflow: None, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that nothing has befallen."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    finished = training.start().end()
    assert finished.returncode == 0, finished.output[-6000:]
    training.close()
    return training


@pytest.fixture(scope="session")
def expected(undisturbed: Training) -> str:
    """The digest that it has come to."""
    return digest((undisturbed.folder / "run-0.txt").read_text())


@pytest.fixture
def training(tensorflow: None, tmp_path: pathlib.Path) -> Iterator[Training]:
    """A fresh one."""
    found = Training(tmp_path)
    yield found
    found.close()
