"""Dicts that are made again with other content and stay what they were.

What an object gave in its state_dict is what it may rely on when it gets that back: MultiStepLR
asks its milestones, a Counter, for what no dict has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

# Those that a checkpoint keeps as well (`taskd.checkpoint.values`), and that need nothing but their
# content: the function of a defaultdict could not be sent or saved.
_KINDS = (OrderedDict, Counter)


def is_known(value: Any) -> bool:
    """Whether it is a dict that `dict_as` makes again as what it is."""
    return type(value) is dict or type(value) in _KINDS


def dict_as(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """`items` as a dict of the kind that `original` is; a plain one if that is not known.

    With the attributes of an OrderedDict: the state_dict of a module has `_metadata`.
    """
    if type(original) not in _KINDS:
        return items
    made = type(original)(items)
    if type(original) is OrderedDict:  # of others, pickle forgets them
        vars(made).update(vars(original))
    return made
