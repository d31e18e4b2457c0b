"""What a generation has asked of accelerators, which work behind the back of the main thread.

A collective of NCCL or HCCL returns at once; its result is there when the device has come so far.
If it is aborted, the device goes on with whatever is in its memory, and nothing raises. So what is
built on collectives is believed when the device has done them, and nothing was aborted before.

Knows no generations and no steps: `taskd.worker.state.step` says when.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from taskd.worker import internals
from taskd.worker.process.aborting import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

# A watchdog of torch or torch_npu ends this process a minute after a collective has failed, also
# when that was healed long ago. torchrun sets the first one to "1".
_WATCHDOG_ENVS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
_OFF = "0"
_TIMEOUT_S = 600.0  # torch's own for NCCL
# Until then it sleeps, four times as long as this (torch's default is 15 s), and whoever frees the
# group waits for it.
_DUMP_ENV, _DUMP_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "25"


class DeviceWork:
    """Of the groups of one generation. Main thread, where nothing else is said."""

    def __init__(self) -> None:
        self._backends: dict[int, Any] = {}  # by id
        self._kinds: set[str] = set()
        self._streams: dict[str, Any] = {}  # by kind: what the main thread has waited for last
        self.is_aborted = False  # what the device has not done may come to nothing
        self._longest_s = _TIMEOUT_S  # the longest timeout of the groups: torch's `timeout=`
        self._done = threading.Event()  # an abort has been carried out
        self._asked: tuple[int, ...] | None = None  # of each backend at `note`; None: not known

    def add(self, group: Any) -> None:
        """A process group was created: its backends, if they work on a device."""
        for device, backend in _backends(group):
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if timeout is not None:
                self._longest_s = max(self._longest_s, timeout.total_seconds())
            # gloo copies to the host and back, and a collective that failed raises
            if device.type != "cpu" and "Gloo" not in type(backend).__name__:
                self._backends[id(backend)] = backend
                self._kinds.add(device.type)

    def remove(self, groups: Iterable[Any]) -> None:
        """They were destroyed. What was asked of them, and their kinds of device, still count."""
        for group in groups:
            for _, backend in _backends(group):
                if self._backends.pop(id(backend), None) is not None:
                    self._asked = None

    def _modules(self) -> dict[str, Any]:
        """By kind: those of devices in use. A group may serve more kinds than there are here."""
        torch = sys.modules["torch"]
        found = {}
        for kind in self._kinds:
            module: Any = getattr(torch, kind, None)
            if hasattr(module, "is_initialized") and module.is_initialized():
                found[kind] = module
        return found

    @property
    def is_used(self) -> bool:
        """Whether any group works on a device."""
        return bool(self._modules())

    def begin_abort(self) -> None:
        """The groups are about to be aborted. From any thread."""
        self.is_aborted = True

    def end_abort(self) -> None:
        """All groups were aborted. From any thread."""
        self._done.set()

    def await_abort(self, limit_s: float) -> None:
        """Another thread aborts the groups: return when it has, or after the limit.

        Two threads that end one communicator at the same time break the memory of this process
        (NCCL 2.28).
        """
        if self.is_used:
            self._done.wait(limit_s)

    def wait(self) -> None:
        """Return when the device has done what it was asked for.

        Raises:
            RuntimeError: the groups were aborted meanwhile: what came of it cannot be known.
        """
        modules = self._modules()
        for kind, module in modules.items():
            if not _is_capturing(module):
                stream = self._streams[kind] = module.current_stream()
                stream.synchronize()
        if modules and self.is_aborted:
            message = "the process groups were aborted while the device worked on this step"
            raise RuntimeError(message)

    def may_be_stuck(self) -> bool:
        """Whether there may be a collective that does not end: the device is busy.

        Before the first `wait` nothing is known of the device, and the answer is yes. From any
        thread.
        """
        if self.is_aborted or not self.is_used:
            return False
        try:
            streams = list(self._streams.values())
            return not streams or not all(stream.query() for stream in streams)
        except RuntimeError:  # the device is broken: the main thread will see
            return False

    @property
    def longest_s(self) -> float:
        """So long a collective may take. From any thread."""
        return self._longest_s

    def note(self) -> None:
        """Remember what has been asked for up to here, for `wait_for_more`."""
        self._asked = self._count() if self.is_used else None

    def wait_for_more(self) -> None:
        """As `wait`, if collectives have been asked for since `note`, or that is not known."""
        if self.is_used and (self._asked is None or self._asked != self._count()):
            self.wait()
            self.note()

    def _count(self) -> tuple[int, ...] | None:
        """Collectives of each backend so far; None: one does not tell."""
        try:
            return tuple(
                backend._get_sequence_number_for_group() for backend in self._backends.values()
            )
        except (AttributeError, RuntimeError):
            return None


def _backends(group: Any) -> list[tuple[Any, Any]]:
    """By device of the group."""
    if not internals.has(
        "the backends of process groups", (group, "_device_types"), (group, "_get_backend")
    ):
        return []
    found = []
    for device in group._device_types:
        try:
            found.append((device, unwrapped(group._get_backend(device))))
        except RuntimeError:  # a device type without a backend of its own
            continue
    return found


def _is_capturing(module: Any) -> bool:
    """Whether what is asked of the device is only recorded, for a graph: nothing is done yet."""
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def keep_watchdogs_quiet(environment: MutableMapping[str, str] = os.environ) -> None:
    """A collective that fails costs no process: taskd notices faults and hangs, and aborts.

    For groups that are created from now on. A value that torchrun does not set by itself is the
    user's, and stays.
    """
    for name in _WATCHDOG_ENVS:
        if environment.get(name, "1") == "1":
            environment[name] = _OFF
    environment.setdefault(_DUMP_ENV, _DUMP_MS)
