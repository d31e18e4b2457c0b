"""Plain values of a rank at a commit that it did not live to see.

The others have completed a step in which it was stopped. A value that was the same on both ranks at
the commit before is taken from the one whose copy it gets. One that differed is its own: what that
one has means nothing here. Of its own it is known what it was at the end of the forward pass, or
when the optimizer began; what the script had still to change is lost.
"""

import logging
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)


def settle(
    who: str,
    pending: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    theirs: Mapping[str, Any],
    theirs_before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The values at that commit. Warns of its own ones.

    Args:
        who: the rank and the TrainState, for the warning.
        pending: its own within the step.
        before: its own at the commit before; None: not known.
        theirs: of the rank whose copy it gets, at that commit.
        theirs_before: of that rank at the commit before; None: not known.
    """
    before, theirs_before = before or {}, theirs_before or {}
    own = sorted(
        name
        for name in theirs.keys() & pending.keys() & before.keys() & theirs_before.keys()
        if is_different(before[name], theirs_before[name])
    )
    if own:
        log.warning(
            "%s: plain values that differ between ranks are as this rank had them before it was "
            "stopped in a step that the others have completed: what the script changes in %s "
            "after the forward pass or the optimizer step is missing for that step",
            who,
            ", ".join(own),
        )
    return {**theirs, **{name: pending[name] for name in own}}


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
