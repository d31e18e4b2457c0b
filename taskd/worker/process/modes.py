"""What torch keeps for the main thread and context managers switch: the same at every entry.

`Interrupted` may be raised within the `__enter__` or `__exit__` of one: behind the line that
switches gradients off, and before the one that says that they have to be switched on again. The
next entry would then train without gradients, on another device, or, with a cache of autocast that
nobody has emptied, with weights of the step before. So what the first entry finds is noted, and
put back before each later one.

Knows torch, and nothing of recoveries. What torch does not document is tried
(`taskd.worker.internals`).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils._device as device_modes
import torch.utils._python_dispatch as dispatch_modes
from torch import overrides

from taskd.worker import internals

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_WHAT = "the modes of a thread"
_HOOKS = "the hooks of saved tensors"  # torch 2.7 does not tell of them
_DISPATCH_FLAGS = ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode")


class _Mode(NamedTuple):
    """`write` gets what `read` has returned. `what`: what is lost where torch has not all of it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    what: str = _WHAT


class Modes:
    """Of the main thread, which calls `begin`."""

    def __init__(self) -> None:
        self._noted: list[tuple[_Mode, Any]] = []
        self._guards: list[Any] = []  # each stands for one that was left without its end

    def begin(self) -> None:
        """An entry: note everything at the first one, put everything back at others."""
        if not self._noted:
            for mode in known_modes(self._guards):
                _attempt(mode.what, partial(self._note, mode))
            return
        left = [
            mode.name
            for mode, wanted in self._noted
            if _attempt(mode.what, partial(_put_back, mode, wanted))
        ]
        torch.clear_autocast_cache()  # between the end of autocast and this line of its own
        if left:
            log.info("an interrupt has left %s; put back for the next entry", ", ".join(left))

    def _note(self, mode: _Mode) -> None:
        self._noted.append((mode, mode.read()))


def _attempt(what: str, use: Callable[[], Any]) -> Any:
    """As `internals.attempt`, also where torch takes other arguments, or does not know a device."""
    try:
        return internals.attempt(what, use)
    except (TypeError, RuntimeError) as error:
        internals.lose(what, error)
        return None


def _put_back(mode: _Mode, wanted: Any) -> bool:
    """Whether it was another one."""
    if mode.read() == wanted:
        return False
    mode.write(wanted)
    return True


def known_modes(guards: list[Any]) -> list[_Mode]:
    """All of them. `guards` keeps what has to live for as long as inference mode is put back."""
    return [
        _Mode("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        _Mode(
            "inference mode",
            torch.is_inference_mode_enabled,
            lambda wanted: _set_inference_mode(guards, wanted),
        ),
        _Mode("anomaly detection", _anomaly, lambda wanted: torch.set_anomaly_enabled(*wanted)),
        _Mode("threads of backward", _has_threads, _set_threads),
        _Mode("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Mode("deterministic algorithms", _determinism, _set_determinism),
        _Mode("the nesting of autocast", _nesting, _set_nesting),
        _Mode(
            "the cache of autocast",
            torch.is_autocast_cache_enabled,
            torch.set_autocast_cache_enabled,
        ),
        *(_autocast(kind) for kind in _device_kinds()),
        _Mode("hooks of saved tensors", _top_hooks, _set_top_hooks, _HOOKS),
        _Mode("whether tensors may have such hooks", _hooks_problem, _set_hooks_problem),
        _Mode("function modes", _function_modes, _set_function_modes),
        _Mode("dispatch modes", _dispatch_modes, _set_dispatch_modes),
        *(_stream(kind) for kind in _device_kinds() if kind != "cpu"),
    ]


def _device_kinds() -> list[str]:
    """The CPU, and the accelerators whose module is there."""
    return ["cpu", *(kind for kind in ("cuda", "npu") if hasattr(torch, kind))]


def _autocast(kind: str) -> _Mode:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def write(wanted: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, wanted[0])
        torch.set_autocast_dtype(kind, wanted[1])

    return _Mode(f"autocast of {kind}", read, write)


def _stream(kind: str) -> _Mode:
    """The current stream of the device that was the current one; None: no device is in use.

    A device that comes into use later has its default stream.
    """
    module = getattr(torch, kind)

    def read() -> Any:
        return module.current_stream() if module.is_initialized() else None

    def write(wanted: Any) -> None:
        if module.is_initialized():
            module.set_stream(module.default_stream() if wanted is None else wanted)

    return _Mode(f"the stream of {kind}", read, write)


def _set_inference_mode(guards: list[Any], wanted: bool) -> None:
    guards.append(torch._C._InferenceMode(wanted))
    guards[-1].__enter__()


def _has_threads() -> bool:
    return bool(torch._C._is_multithreading_enabled())


def _set_threads(wanted: bool) -> None:
    torch._C._set_multithreading_enabled(wanted)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(wanted: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_nesting(wanted: int) -> None:
    while _nesting() > wanted:
        torch.autocast_decrement_nesting()
    while _nesting() < wanted:
        torch.autocast_increment_nesting()


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _set_top_hooks(wanted: Any) -> None:
    while (top := _top_hooks()) is not None and top != wanted:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _hooks_problem() -> Any:
    """Why tensors may have no such hooks; None: they may."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


def _set_hooks_problem(wanted: Any) -> None:
    if wanted is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(wanted)


def _function_modes() -> tuple[list[Any], Any]:
    """The stack, and the device that `torch.device` as a context has made the default."""
    return overrides._get_current_function_mode_stack(), device_modes.CURRENT_DEVICE


def _set_function_modes(wanted: tuple[list[Any], Any]) -> None:
    stack, device_modes.CURRENT_DEVICE = wanted
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in stack:
        torch._C._push_on_torch_function_stack(mode)


def _dispatch_modes() -> tuple[list[Any], list[Any]]:
    """The stack, and what torch keeps about it."""
    flags = [getattr(dispatch_modes, name, None) for name in _DISPATCH_FLAGS]
    return dispatch_modes._get_current_dispatch_mode_stack(), flags


def _set_dispatch_modes(wanted: tuple[list[Any], list[Any]]) -> None:
    stack, flags = wanted
    for mode in reversed(_dispatch_modes()[0][len(stack) :]):
        torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))
    for name, value in zip(_DISPATCH_FLAGS, flags, strict=True):
        if value is not None:
            setattr(dispatch_modes, name, value)
