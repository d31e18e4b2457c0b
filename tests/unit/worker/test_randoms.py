"""RandomStates: what is captured is exact, and nothing that was drawn goes unnoticed."""

import pickle
import random

import numpy as np
import pytest
import torch

from taskd.worker.state import randoms as randoms_module
from taskd.worker.state.randoms import RandomStates

DRAWS = {
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(1),
    "torch double normal": lambda: torch.randn(1, dtype=torch.float64),
    "torch many": lambda: torch.rand(624),
    "torch seed": lambda: torch.manual_seed(int(torch.randint(1 << 40, (1,)))),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python many": lambda: [random.getrandbits(32) for _ in range(624)],
    "python seed": lambda: random.seed(random.random()),
    "numpy": np.random.rand,
    "numpy normal": np.random.standard_normal,
    "numpy many": lambda: np.random.bytes(4 * 624),  # noqa: NPY002
    "numpy seed": lambda: np.random.seed(np.random.randint(1 << 30)),  # noqa: NPY002
}


def seen() -> tuple:
    """The generators, as they say themselves."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return bytes(torch.get_rng_state().numpy()), random.getstate(), (name, keys.tobytes(), *rest)


@pytest.fixture(autouse=True)
def leave_no_trace():
    torch_state, python_state, numpy_state = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
    )
    yield
    (
        torch.set_rng_state(torch_state),
        random.setstate(python_state),
        np.random.set_state(numpy_state),  # noqa: NPY002
    )


@pytest.mark.parametrize("seed", [None, 5])
def test_the_memory_of_each_generator_is_known_on_this_torch_python_and_numpy(seed):
    if seed is not None:
        torch.manual_seed(seed)
    randoms = RandomStates()
    randoms.capture()
    assert None not in (randoms._torch_mark, randoms._python_mark, randoms._numpy_mark)


def test_looking_for_it_changes_nothing():
    torch.manual_seed(7)
    before = seen()
    RandomStates()
    assert seen() == before


@pytest.mark.parametrize("name", sorted(DRAWS))
@pytest.mark.parametrize("layouts", ["known", "unknown"])
def test_every_draw_is_noticed_and_comes_back(name, layouts, monkeypatch):
    if layouts == "unknown":
        monkeypatch.setattr(randoms_module, "_is_python_layout_known", lambda: False)
        monkeypatch.setattr(randoms_module, "_find_torch_mark", lambda: None)
    randoms = RandomStates()
    if layouts == "unknown":
        randoms.capture()
        randoms._numpy_mark = None
    for _ in range(5):  # a pair of normal deviates is held back every other time
        captured = randoms.capture()
        before = seen()
        DRAWS[name]()
        assert seen() != before
        assert randoms.capture() != captured
        randoms.restore(pickle.loads(captured))
        assert seen() == before
        assert pickle.loads(randoms.capture()) == pickle.loads(captured)
        DRAWS[name]()


def test_nothing_is_captured_again_while_nothing_is_drawn():
    randoms = RandomStates()
    first = randoms.capture()
    assert randoms.capture() is first
    DRAWS["python"]()
    second = randoms.capture()
    assert second is not first
    assert randoms.capture() is second


def test_another_bit_generator_of_numpy_is_followed():
    randoms = RandomStates()
    randoms.capture()
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        captured = randoms.capture()
        drawn = np.random.rand()  # noqa: NPY002
        assert randoms.capture() != captured
        randoms.restore(pickle.loads(captured))
        assert np.random.rand() == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(own)
    assert pickle.loads(randoms.capture())["numpy"][0] == "MT19937"
