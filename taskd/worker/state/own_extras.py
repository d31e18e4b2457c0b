"""The extras of a rank at a commit that it did not live to see.

The others have completed a step in which it was stopped. Its own are known as they were at the end
of the forward pass, or when the optimizer began. What the rank whose copy it gets has not changed
later than that is right so (a place in the data, running statistics). Of the rest, what was the
same on both ranks at the commit before (an epoch, a schedule, a generator seeded alike) is taken
from that one. What differed is its own, and what the script had still to change in it is lost.
"""

import hashlib
import logging
import math
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from taskd.worker.state.extras import Extras, Part, decode_part

log = logging.getLogger(__name__)

# By ("values", name), ("positions", role), ("random", kind of generator), and ("buffers", name):
# the checksum of a buffer.
Table = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Told:
    """What another rank tells of its extras.

    `now` at that commit, `before` at the one before, None where they are not known; `late`: what it
    has changed behind its last forward pass, None: not known.
    """

    now: Table | None = None
    before: Table | None = None
    late: frozenset[tuple[str, str]] | None = None


def table_of(found: Extras | None, state: str) -> Table | None:
    """The extras of that TrainState one by one; None: they are not known."""
    data = None if found is None else found.parts.get(state)
    if found is None or data is None:
        return None
    part = decode_part(data)
    buffers = {name: hashlib.blake2b(data).digest() for name, data in part.buffers.items()}
    kinds = {
        "values": part.values, "positions": part.positions, "random": found.random,
        "buffers": buffers,
    }  # fmt: skip
    return {(kind, name): item for kind, items in kinds.items() for name, item in items.items()}


def changed(before: Table, now: Table) -> frozenset[tuple[str, str]]:
    """What is not the same in both, or in one only."""
    return frozenset(key for key in before.keys() | now.keys() if _is_other(key, before, now))


def _is_other(key: tuple[str, str], one: Table, other: Table) -> bool:
    if key not in one or key not in other:
        return (key in one) != (key in other)
    return is_different(one[key], other[key])


def settle(
    who: str,
    state: str,
    found: Extras,
    before: Extras | None,
    told: Told,
    walkers: Collection[str] = (),
) -> tuple[Part, dict[str, Any]]:
    """The part of that TrainState, and the generators, at that commit. Warns of what is lost.

    Args:
        who: the rank, for the warning.
        state: the name of the TrainState; `found` has a part of it.
        found: its own extras within the step.
        before: its own at the commit before; None: not known.
        told: of the rank whose copy it gets.
        walkers: roles of what walks through data, which was read before the forward pass.
    """
    part, pending = decode_part(found.parts[state]), table_of(found, state) or {}
    mine, theirs, now = table_of(before, state), told.before, told.now or {}
    late = {*(pending.keys() & now.keys() if told.late is None else told.late)}
    late -= {("positions", role) for role in walkers}
    new = now.keys() - pending.keys()
    if mine is None or theirs is None:  # of a value theirs is as good as any
        own, common = set(), {key for key in late & now.keys() if key[0] == "values"}
    else:
        own = {key for key in late if _is_other(key, mine, theirs)}
        common, new = late & now.keys() - own, new - theirs.keys()
    lost = own & pending.keys()
    if lost:
        log.warning(
            "%s: TrainState %r: what differs between ranks is as this rank had it before it was "
            "stopped in a step that the others have completed: what the script changes after the "
            "forward pass or the optimizer step is missing for that step in %s",
            who,
            state,
            ", ".join(sorted(map(_name, lost))),
        )
    values = {**part.values, **_of("values", now, common | new)}
    positions = {**part.positions, **_of("positions", now, common)}
    random = {**found.random, **_of("random", now, common)}
    buffers = {name: data for name, data in part.buffers.items() if ("buffers", name) not in common}
    return replace(part, values=values, positions=positions, buffers=buffers), random


def _of(kind: str, table: Table, keys: Collection[tuple[str, str]]) -> dict[str, Any]:
    return {key[1]: table[key] for key in keys if key[0] == kind}


def _name(key: tuple[str, str]) -> str:
    return f"the generator of {key[1]}" if key[0] == "random" else key[1]


def is_different(one: Any, other: Any) -> bool:
    """Whether these are not the same for certain. What cannot be compared may be."""
    try:
        return _differ(one, other)
    except Exception:  # noqa: BLE001 - code of the user's classes
        return False


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one != other and not (math.isnan(one) and math.isnan(other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return not (is_alike and torch.equal(one.cpu().nan_to_num(), other.cpu().nan_to_num()))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() != other.keys() or any(_differ(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(map(_differ, one, other))
    if type(one) is type(other) and type(one).__eq__ is object.__eq__:
        return False  # two of such objects are never equal, whatever is in them
    return pickle.dumps(one) != pickle.dumps(other) and bool(_any(one != other))


def _any(compared: Any) -> Any:
    """Of an array: whether any element is."""
    return compared.any() if hasattr(compared, "any") else compared
