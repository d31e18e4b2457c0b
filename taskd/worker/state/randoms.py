"""The random number generators of this process: torch, devices, python, numpy.

Captured at every commit, put back by a restore.

Asking all of them costs 60 us on a core whose caches the step has just filled with something else.
Nearly all steps draw from one of them at most, so first a few bytes of their memory are looked at:
whether anything was drawn since the last capture. A Mersenne Twister cannot be drawn from without a
change of its position or, every 624 draws, of its words. The layouts are verified once in each
process; where one is not as expected, that generator is asked each time.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker import internals
from taskd.worker.state.extras import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable

_TWISTER = struct.Struct("625I")  # both Mersenne Twisters of Python: 624 words and a position
# the C struct of random.Random begins behind refcount and type: position, words
_PYTHON_OFFSET = 16
_MARK_BYTES = 64  # of a generator's memory: the position and at least ten words
_DEVICE_TYPES = ("cuda", "npu", "xpu")
# torch's CPU state as get_state() gives it: seed, left, seeded, next (24 bytes), 624 words of 8
# bytes, and what is held back of a pair of normal deviates: all zero if nothing is.
_TORCH_WORDS = slice(24, 24 + 16 * 8)
_TORCH_HELD_BACK = slice(24 + 624 * 8, None)

_ABSENT = "absent"  # the mark of a generator that nobody has imported or initialised
_Mark = ctypes.Array[ctypes.c_char]


def _is_compiled(kind: str) -> bool:
    """Whether this torch can have such a device.

    Else there is nothing to be asked at each commit.
    """
    device = getattr(torch, kind, None)
    return device is not None and getattr(device, "_is_compiled", lambda: True)()


def _mark_at(address: int) -> _Mark:
    return (ctypes.c_char * _MARK_BYTES).from_address(address)


def _python_words() -> bytes:
    return ctypes.string_at(id(random._inst) + _PYTHON_OFFSET, _TWISTER.size)  # type: ignore[attr-defined]


def _is_python_layout_known() -> bool:
    """Compare the C struct with what getstate() says, once.

    Another interpreter may lay it out differently.
    """
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        return False
    state = random.getstate()[1]
    return _TWISTER.unpack(_python_words()) == (state[624], *state[:624])


def _find_torch_mark() -> _Mark | None:
    """The position and the first words of torch's default generator, found by their content.

    None: not where they should be.
    """
    generator = torch.default_generator
    state = generator.get_state()
    address = getattr(generator, "_cdata", None)
    if address is None or state.numel() != 5056:
        return None
    words = struct.pack(
        "16I", *(word & 0xFFFFFFFF for word in struct.unpack("16Q", _bytes_of(state)[_TORCH_WORDS]))
    )
    try:
        # unlike a pointer, it says so if nothing is there
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            found = os.pread(memory.fileno(), 512, address).find(words)
    except OSError:
        return None
    if found < 4:
        return None
    mark = _mark_at(address + found - 4)  # the position is the word before
    before = mark.raw
    torch.rand(1, device="cpu")
    is_moved = mark.raw != before
    generator.set_state(state)
    return mark if is_moved and mark.raw == before else None


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


class RandomStates:
    """Captures and restores the generators of this process."""

    def __init__(self) -> None:
        self._python_mark = (
            _mark_at(id(random._inst) + _PYTHON_OFFSET) if _is_python_layout_known() else None
        )
        self._torch_mark = _find_torch_mark()
        if self._torch_mark is None:
            internals.lose("the memory of torch's generator", "not where it was")
        self._numpy: Any = None  # numpy.random.mtrand._rand, once somebody has imported it
        self._numpy_owner: Any = None
        self._numpy_mark: _Mark | None = None
        # Looked up once: asking torch for a module that it has not costs microseconds. An extension
        # is imported by the first restore().
        self._devices = [
            (kind, getattr(torch, kind)) for kind in _DEVICE_TYPES if _is_compiled(kind)
        ]
        # In the order of the marks; None: the mark is the state.
        self._readers: list[tuple[str, Callable[[], Any] | None]] = [
            ("torch", _read_torch),
            ("python", random.getstate if self._python_mark is None else _read_python),
            ("numpy", self._read_numpy),
            *((kind, None) for kind, _ in self._devices),
        ]
        # What was captured last, and what the generators looked like then.
        self._marks: list[Any] = []
        self._captured: dict[str, Any] = {}
        self._pickled = b""

    def capture(self) -> bytes:
        """All generators, pickled as builtin types.

        The same object as before if nothing was drawn since.
        """
        torch_mark, python_mark = self._torch_mark, self._python_mark
        marks = [
            None if torch_mark is None else torch_mark.raw,
            None if python_mark is None else (python_mark.raw, random._inst.gauss_next),  # type: ignore[attr-defined]
            self._look_at_numpy()
            if self._numpy is not None or "numpy.random" in sys.modules
            else _ABSENT,
        ]
        for _, device in self._devices:
            # Seed and offset, 16 bytes that live on the host: nothing waits for the device.
            marks.append(
                device.get_rng_state().numpy().tobytes() if device.is_initialized() else _ABSENT
            )
        if marks != self._marks or None in marks:
            self._capture(marks)
        return self._pickled

    def torch_state(self) -> bytes:
        """Torch's generator as it is now; the same object as before if it was captured so."""
        mark = self._torch_mark
        if mark is None or not self._marks or mark.raw != self._marks[0]:
            return _read_torch()
        captured: bytes = self._captured["torch"]
        return captured

    def _capture(self, marks: list[Any]) -> None:
        """Read those that may have changed."""
        captured = dict(self._captured)
        before = self._marks or [None] * len(marks)
        for (kind, read), mark, old in zip(self._readers, marks, before, strict=True):
            if mark is not _ABSENT and (mark is None or mark != old):
                captured[kind] = mark if read is None else read()
        # The second of a pair of normal deviates may be drawn without a trace in the mark.
        if any(captured["torch"][_TORCH_HELD_BACK]):
            marks[0] = None
        if marks[2] is not _ABSENT and captured["numpy"][0] == "MT19937" and captured["numpy"][3]:
            marks[2] = None
        self._marks = marks
        if captured != self._captured:
            self._captured, self._pickled = captured, pickle.dumps(captured, PROTOCOL)

    def _look_at_numpy(self) -> bytes | None:
        if self._numpy is None:
            self._numpy = sys.modules["numpy.random"].mtrand._rand
        owner = self._numpy._bit_generator
        if owner is not self._numpy_owner:
            self._numpy_owner, self._numpy_mark, self._marks = owner, None, []
            if type(owner).__name__ == "MT19937":
                mark = _mark_at(owner.ctypes.state_address + _TWISTER.size - _MARK_BYTES)
                _, words, position, *_ = self._numpy.get_state()
                if mark.raw == words.tobytes()[4 - _MARK_BYTES :] + struct.pack("i", position):
                    self._numpy_mark = mark
        return None if self._numpy_mark is None else self._numpy_mark.raw

    def _read_numpy(self) -> tuple[Any, ...]:
        if type(self._numpy_owner).__name__ != "MT19937":
            return ("bit generator", self._numpy_owner.state)
        name, keys, position, has_gauss, gauss = self._numpy.get_state()
        return (name, keys.tobytes(), position, has_gauss, gauss)

    def restore(self, captured: dict[str, Any]) -> None:
        """Put every captured generator back.

        Generators that are not there now (a device not initialised) are left out.
        """
        torch.default_generator.set_state(_byte_tensor(captured["torch"]))
        python = captured["python"]
        if isinstance(python[0], bytes):
            words = _TWISTER.unpack(python[0])
            python = (3, (*words[1:], words[0]), python[1])
        random.setstate(python)
        if "numpy" in captured:
            _restore_numpy(captured["numpy"])
        for kind, device in self._devices:
            if kind in captured and device.is_available():
                device.set_rng_state(_byte_tensor(captured[kind]))
        self._marks = []


def _read_torch() -> bytes:
    return _bytes_of(torch.default_generator.get_state())


def _read_python() -> tuple[Any, ...]:
    return (_python_words(), random._inst.gauss_next)  # type: ignore[attr-defined]


def _restore_numpy(state: tuple[Any, ...]) -> None:
    import numpy as np  # noqa: PLC0415

    if state[0] == "bit generator":
        np.random.mtrand._rand._bit_generator.state = state[1]
    else:
        name, keys, position, has_gauss, gauss = state
        words = np.frombuffer(keys, dtype=np.uint32)
        np.random.set_state((name, words, position, has_gauss, gauss))  # noqa: NPY002


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
