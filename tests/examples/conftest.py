"""What several tests of the examples compare with."""

from __future__ import annotations

import pytest

from tests.examples.test_examples import EXAMPLES, finals, run_plainly


@pytest.fixture(scope="session")
def char_gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What six steps of the char GPT with two ranks under plain torchrun end with."""
    output = run_plainly(tmp_path_factory.mktemp("char_gpt"), EXAMPLES / "char_gpt.py", "--steps", "6")
    (final,) = finals(output)
    return final
