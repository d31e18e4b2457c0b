"""What several tests of the examples compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.examples.test_examples import EXAMPLES, finals, run_plainly
from tests.process import harness

if TYPE_CHECKING:
    import pathlib


@pytest.fixture(scope="session")
def char_gpt(tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path) -> str:
    """What six steps of the char GPT with two ranks end with, without taskd."""

    def train() -> str:
        (final,) = finals(
            run_plainly(
                tmp_path_factory.mktemp("char_gpt"), EXAMPLES / "char_gpt.py", "--steps", "6"
            )
        )
        return final

    return harness.once(shared_folder, "char gpt", train)
