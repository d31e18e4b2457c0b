"""What comes with a snapshot of another node is loaded without running any of it."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import random
from typing import Any

import pytest
import torch

from taskd.checkpoint.pieces import Held
from taskd.errors import StateError
from taskd.worker.saving import unpickling
from taskd.worker.saving.snapshots import Place
from taskd.worker.state.extras import PROTOCOL
from taskd.worker.state.randoms import RandomStates


class Harmful:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        {"w": Place((4, 2), (2, 0), torch.bfloat16, (1, 3))},
        {
            "v": Held(
                {"lr": 0.1, "betas": (0.9, 0.99), "name": "x", "blob": b"y", "none": None}, (0,)
            )
        },
        (pathlib.Path("/checkpoints"), ("train",)),
        random.Random(7).getstate(),
        {1, 2},
        1 + 2j,
        torch.Size([3]),
        torch.device("cpu"),
        torch.float16,
        {"t": torch.arange(6).view(2, 3), "u": torch.ones(3, dtype=torch.bfloat16)},
    ],
    ids=repr,
)
def test_what_a_snapshot_is_made_of_comes_back(value: object) -> None:
    assert repr(unpickling.loads(pickle.dumps(value, PROTOCOL))) == repr(value)


def test_generators_come_back() -> None:
    import numpy as np

    np.random.default_rng()
    captured = RandomStates().capture()
    assert unpickling.loads(captured) == pickle.loads(captured)
    state = np.random.default_rng(3).bit_generator.state
    assert unpickling.loads(pickle.dumps(state, PROTOCOL)) == state


@pytest.mark.parametrize(
    "harmful",
    [
        Harmful(os.system, "true"),
        Harmful(eval, "1"),
        Harmful(getattr, object(), "x"),
        print,
        torch.load,
        torch.hub.load,
        os,
        Harmful(torch.storage._load_from_bytes, pickle.dumps(Harmful(os.system, "true"))),
    ],
    ids=lambda thing: getattr(thing, "__name__", str(type(thing).__name__)),
)
def test_nothing_else_is_touched(tmp_path: pathlib.Path, harmful: object) -> None:
    try:
        data = pickle.dumps({"innocent": [harmful]}, PROTOCOL)
    except TypeError:
        return  # cannot even be said
    with pytest.raises(StateError):
        unpickling.loads(data)


def test_a_file_that_would_be_written_is_not(tmp_path: pathlib.Path) -> None:
    inner = io.BytesIO()
    torch.save({"x": Harmful(pathlib.Path.touch, tmp_path / "harm")}, inner)
    for data in (
        pickle.dumps(Harmful(torch.storage._load_from_bytes, inner.getvalue())),
        pickle.dumps(Harmful(pathlib.Path.touch, tmp_path / "harm")),
    ):
        with pytest.raises(StateError):
            unpickling.loads(data)
        assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x05", b"garbage", pickle.dumps([1] * 100, PROTOCOL)[:-3]]
)
def test_damage_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(StateError):
        unpickling.loads(data)
