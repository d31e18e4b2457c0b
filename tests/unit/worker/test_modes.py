"""What an interrupt leaves behind of torch's context managers is put back for the next entry."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from taskd.worker.process.modes import Modes, known_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OwnFunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class OwnDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def saved_tensors_hooks() -> contextlib.AbstractContextManager:
    return torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)


@contextlib.contextmanager
def dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield


@contextlib.contextmanager
def determinism() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield


LEFT: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomaly detection": torch.autograd.detect_anomaly,
    "threads of backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "the default dtype": dtype,
    "deterministic algorithms": determinism,
    "the nesting of autocast": lambda: torch.autocast("cpu", enabled=False),
    "autocast of cpu": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "hooks of saved tensors": saved_tensors_hooks,
    "whether tensors may have such hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here")
    ),
    "function modes": lambda: torch.device("meta"),
    "dispatch modes": OwnDispatchMode,
}
pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def is_there(name: str) -> bool:
    """Whether this torch tells of it: 2.7 has no word of its hooks."""
    return name != "hooks of saved tensors" or hasattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks"
    )


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Whatever a test leaves."""
    guards: list[object] = []
    before = [(mode, mode.read()) for mode in known_modes(guards) if is_there(mode.name)]
    yield
    for mode, value in before:
        mode.write(value)
        assert mode.read() == value


def test_each_mode_is_left_in_one_of_these_tests() -> None:
    names = {mode.name for mode in known_modes([])}
    without = {"the cache of autocast", "autocast of cuda", "the stream of cuda"}
    assert names - without == LEFT.keys()


@pytest.mark.parametrize("name", [name for name in LEFT if is_there(name)])
def test_one_that_was_entered_and_not_left_is_put_back(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    modes = Modes()
    modes.begin()
    left = LEFT[name]()
    left.__enter__()
    caplog.set_level(logging.INFO)
    modes.begin()
    assert name in caplog.text
    parameter = torch.nn.Parameter(torch.ones(2))
    (parameter * 2.0).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.device.type == "cpu"
    assert parameter.grad.dtype == torch.float32
    caplog.clear()
    modes.begin()
    assert not caplog.records


def test_weights_that_autocast_has_cast_are_not_those_of_the_step_before() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    batch = torch.ones(1, 4)
    modes = Modes()
    modes.begin()
    left = torch.autocast("cpu", dtype=torch.bfloat16)
    left.__enter__()
    layer(batch)  # casts the weight, and keeps that until the outermost autocast ends
    modes.begin()
    with torch.no_grad():
        layer.weight.fill_(2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(batch).tolist() == [[8.0] * 4]


def test_what_the_script_has_switched_before_its_function_stays() -> None:
    own = OwnFunctionMode()
    own.__enter__()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    modes = Modes()
    modes.begin()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))  # which takes the others off, and puts them back
        stack.pop_all()
    modes.begin()
    assert torch.overrides._get_current_function_mode_stack() == [own]
    assert torch.get_default_dtype() == torch.float64
    assert not torch.is_grad_enabled()
    assert torch.ones(1).device.type == "cpu"
