"""Dicts, lists and tuples that are made again with other content and stay what they were.

What an object gave in its state_dict is what it may rely on when it gets that back: MultiStepLR
asks its milestones, a Counter, for what no dict has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Those that a checkpoint keeps as well (`taskd.checkpoint.values`), and that need nothing but their
# content: the function of a defaultdict could not be sent or saved.
_KINDS = (OrderedDict, Counter)


def is_known(value: Any) -> bool:
    """Whether it is a dict that `dict_as` makes again as what it is."""
    return type(value) is dict or type(value) in _KINDS


def dict_as(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """`items` as a dict of the kind that `original` is; a plain one if that is not known.

    With `_metadata`, which torch adds to the state_dict of a module: the versions of its parts.
    """
    if type(original) not in _KINDS:
        return items
    made: Any = type(original)(items)
    metadata = getattr(original, "_metadata", None)
    if metadata is not None and type(original) is OrderedDict:
        made._metadata = metadata
    return made


def sequence_as(original: Sequence[Any], items: Iterable[Any]) -> Sequence[Any]:
    """`items` as a list or tuple, whichever `original` is; what has names is a plain tuple then."""
    if isinstance(original, torch.Size):
        return torch.Size(items)
    return list(items) if isinstance(original, list) else tuple(items)
