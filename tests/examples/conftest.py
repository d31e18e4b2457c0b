"""What several tests of the examples compare with."""

from __future__ import annotations

import pytest

from tests.examples.test_examples import EXAMPLES, lines_with, run_plainly


@pytest.fixture(scope="session")
def char_gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of six steps of the char GPT with two ranks under plain torchrun."""
    output = run_plainly(tmp_path_factory.mktemp("char_gpt"), EXAMPLES / "char_gpt.py", "--steps", "6")
    (final,) = lines_with(output, "final: digest")
    return final
