"""What differs from rank to rank and must survive the rank: random number generators, sampler positions, plain values.

Owns the capture of these (microseconds, at every commit), their form as one blob for the black box, and putting them back.
Knows no collectives, no plan and no other rank. The blob is pickled: it never leaves the processes of one rank (the
memory behind the box is an unnamed file that only the agent and this rank's lives hold).
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch

_PROTOCOL = 5                     # fixed: a replacement reads what its predecessor wrote
_TWISTER = struct.Struct("625I")  # both Mersenne Twisters: 624 words and a position
_PYTHON_OFFSET = 16               # the C struct of random.Random begins behind refcount and type
_DEVICE_TYPES = ("cuda", "npu", "xpu")


def _python_words() -> bytes:
    return ctypes.string_at(id(random._inst) + _PYTHON_OFFSET, _TWISTER.size)  # type: ignore[attr-defined]


def _is_python_layout_known() -> bool:
    """Compare the C struct with what getstate() says, once: another interpreter may lay it out differently."""
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        return False
    state = random.getstate()[1]
    return _TWISTER.unpack(_python_words()) == (state[624], *state[:624])


class RandomStates:
    """Captures and restores the generators of this process: torch, devices, python, numpy.

    The legacy numpy generator costs 33 us to ask and python's 9 us, so their memory is read instead (0.5 us each); numpy is asked only
    when that memory changed, or when it held a second normal deviate back (which lies elsewhere).
    """

    def __init__(self) -> None:
        self._reads_python = _is_python_layout_known()
        self._numpy_address: int | None = None
        self._numpy_owner: Any = None
        self._numpy_words = b""
        self._numpy_state: tuple[Any, ...] | None = None
        # Looked up once: asking torch for a module that it has not costs microseconds. An extension is imported by the first restore().
        self._devices = [(kind, getattr(torch, kind)) for kind in _DEVICE_TYPES if hasattr(torch, kind)]

    def capture(self) -> dict[str, Any]:
        """All generators, as builtin types."""
        cpu = torch.default_generator.get_state()
        captured: dict[str, Any] = {"torch": ctypes.string_at(cpu.data_ptr(), cpu.numel())}
        if self._reads_python:
            captured["python"] = (_python_words(), random._inst.gauss_next)  # type: ignore[attr-defined]
        else:
            captured["python"] = random.getstate()
        if "numpy.random" in sys.modules:
            captured["numpy"] = self._capture_numpy()
        for kind, device in self._devices:
            if device.is_initialized():
                # Seed and offset, 16 bytes that live on the host: nothing waits for the device.
                captured[kind] = device.get_rng_state().numpy().tobytes()
        return captured

    def _capture_numpy(self) -> tuple[Any, ...] | None:
        numpy_random = sys.modules["numpy.random"]
        owner = numpy_random.mtrand._rand._bit_generator
        if owner is not self._numpy_owner:
            is_twister = type(owner).__name__ == "MT19937"
            self._numpy_owner = owner
            self._numpy_address = owner.ctypes.state_address if is_twister else None
            self._numpy_state = None
        if self._numpy_address is None:
            return ("bit generator", owner.state)
        words = ctypes.string_at(self._numpy_address, _TWISTER.size)
        if self._numpy_state is None or words != self._numpy_words or self._numpy_state[3]:
            name, keys, position, has_gauss, gauss = numpy_random.get_state()
            self._numpy_state = (name, keys.tobytes(), position, has_gauss, gauss)
            self._numpy_words = words
        return self._numpy_state

    def restore(self, captured: dict[str, Any]) -> None:
        """Put every captured generator back. Generators that are not there now (a device not initialised) are left out."""
        torch.default_generator.set_state(_byte_tensor(captured["torch"]))
        python = captured["python"]
        if isinstance(python[0], bytes):
            words = _TWISTER.unpack(python[0])
            python = (3, (*words[1:], words[0]), python[1])
        random.setstate(python)
        if captured.get("numpy") is not None:
            self._restore_numpy(captured["numpy"])
        for kind, device in self._devices:
            if kind in captured and device.is_available():
                device.set_rng_state(_byte_tensor(captured[kind]))

    def _restore_numpy(self, state: tuple[Any, ...]) -> None:
        import numpy as np  # noqa: PLC0415 - only where the job uses it

        if state[0] == "bit generator":
            np.random.mtrand._rand._bit_generator.state = state[1]
        else:
            name, keys, position, has_gauss, gauss = state
            words = np.frombuffer(keys, dtype=np.uint32)
            np.random.set_state((name, words, position, has_gauss, gauss))  # noqa: NPY002
        self._numpy_state = None


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---------------------------------------------------------------- objects that carry a position: samplers, generators


def read_position(value: Any) -> Any:
    """The state of a per-rank object, whatever it calls it."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):              # numpy.random.Generator
        return value.bit_generator.state
    return value.state_dict()


def write_position(value: Any, position: Any) -> None:
    """Opposite of `read_position`."""
    if isinstance(value, torch.Generator):
        value.set_state(position)
    elif isinstance(value, random.Random):
        value.setstate(position)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = position
    else:
        value.load_state_dict(position)


# ---------------------------------------------------------------- the blob


@dataclass(frozen=True)
class Extras:
    """What one commit (or the step after it, when `is_pending`) left behind, decoded."""

    random: dict[str, Any]
    parts: dict[str, bytes]       # TrainState name -> its `Part`, pickled
    is_pending: bool = False


@dataclass(frozen=True)
class Part:
    """The per-rank part of one TrainState."""

    step: int
    values: dict[str, Any]
    positions: dict[str, Any]
    buffers: dict[str, Any]       # names and bytes of module buffers that change in the forward pass (host memory only)


def encode_part(step: int, values: dict[str, Any], positions: dict[str, Any], buffers: dict[str, Any]) -> bytes:
    """The pickled form of a `Part` (plain tuple: half the time of pickling the class)."""
    return pickle.dumps((step, values, positions, buffers), _PROTOCOL)


def decode_part(data: bytes) -> Part:
    """Opposite of `encode_part`."""
    return Part(*pickle.loads(data))  # noqa: S301 - our own black box


def encode(captured: dict[str, Any], parts: dict[str, bytes], is_pending: bool) -> bytes:
    """One blob for the black box."""
    return pickle.dumps((captured, parts, is_pending), _PROTOCOL)


def decode(data: bytes) -> Extras:
    """Opposite of `encode`."""
    return Extras(*pickle.loads(data))  # noqa: S301 - our own black box
