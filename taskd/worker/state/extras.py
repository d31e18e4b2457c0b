"""What differs from rank to rank and must survive the rank.

Random number generators, sampler positions, plain values.

Owns the form of these as one blob for the black box (`taskd.worker.state.randoms` has the
generators, `taskd.worker.objects.positions` the samplers). Knows no collectives, no plan and no
other rank. The blob is pickled: it never leaves the processes of one rank (the memory behind the
box is an unnamed file that only the agent and this rank's lives hold).
"""

import io
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from taskd.worker.objects import devices

PROTOCOL = 5  # fixed: a replacement reads what its predecessor wrote

# ---------------------------------------------------------------- the blob


@dataclass(frozen=True)
class Extras:
    """What one commit (or the step after it) left behind, decoded."""

    random: dict[str, Any]  # for `RandomStates.restore`
    parts: dict[str, bytes]  # TrainState name -> its `Part`, pickled
    # TrainStates whose part is as it was within the step, and was not settled (`own_extras`) since
    pending: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Part:
    """The per-rank part of one TrainState."""

    values: dict[str, Any]
    positions: dict[str, Any]
    # names and bytes of module buffers that change in the forward pass (host memory only)
    buffers: dict[str, Any]
    world: tuple[int, ...] = ()  # of which ranks of the job it consisted; (): all


def encode_part(
    values: dict[str, Any],
    positions: dict[str, Any],
    buffers: dict[str, Any],
    world: tuple[int, ...] = (),
) -> bytes:
    """The pickled form of a `Part` (plain tuple: half the time of pickling the class)."""
    return devices.dumps((values, positions, buffers, *((world,) if world else ())), PROTOCOL)


def decode_part(data: bytes, loads: Callable[[bytes], Any] = pickle.loads) -> Part:
    """Opposite of `encode_part`, with all tensors in host memory.

    `loads`: for what does not come from our own black box.
    """
    return Part(*loads(data))


def encode(parts: dict[str, bytes], pending: Collection[str] = ()) -> bytes:
    """The blob for the black box, to be read behind what `RandomStates.capture` pickled."""
    return pickle.dumps((parts, tuple(pending)), PROTOCOL)


def decode(data: bytes, load: Callable[[io.BytesIO], Any] = pickle.load) -> Extras:
    """Both, from the bytes that were written one behind the other.

    `load`: for what does not come from our own black box.
    """
    stream = io.BytesIO(data)
    random = load(stream)
    parts, pending = load(stream)
    return Extras(random, parts, frozenset(pending))
