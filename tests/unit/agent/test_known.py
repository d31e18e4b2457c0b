"""What libraries have kept of the rank is set to that of the fork."""

from __future__ import annotations

import sys
import types

import pytest

from taskd.agent.spawning import known


def rank_zero_only() -> None:
    """Stands for the function that bears the rank."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lightning.fabric.utilities.rank_zero", 5),
        ("lightning_fabric.utilities.rank_zero", 5),
        ("torchmetrics.utilities.prints", 1),
    ],
)
def test_the_rank_of_a_fork_is_set(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: int
) -> None:
    module = types.ModuleType(name)
    module.rank_zero_only = rank_zero_only
    module._get_rank = lambda: 5
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    known.mend({"RANK": "5", "LOCAL_RANK": "1"})
    assert rank_zero_only.rank == expected


def test_a_library_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lightning.fabric.utilities.rank_zero"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    known.mend({"RANK": "5"})
