"""What modules carry beside tensors: numbers and text, by torch's `get_extra_state()`.

An object with a state_dict of its own stands for all of one module, so that it is remembered,
moved and saved as a scheduler is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class ExtraStates:
    """Of the parts of one module that have any, by their path."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._parts = parts

    @classmethod
    def of(
        cls, label: str, module: nn.Module, is_carried: Callable[[Any], bool]
    ) -> ExtraStates | None:
        """None: there are none. Warns of those that cannot be carried: each step reads them."""
        parts = {}
        for path, part in module.named_modules():
            if type(part).get_extra_state is nn.Module.get_extra_state:
                continue
            if is_carried(part.get_extra_state()):
                parts[path] = part
            else:
                log.warning(
                    "%s: the extra state of %s (get_extra_state) is not carried, as it is not "
                    "made of numbers, text, lists and dicts alone: after a fault it is as the "
                    "script builds it",
                    label,
                    path or type(part).__name__,
                )
        return cls(parts) if parts else None

    def state_dict(self) -> dict[str, Any]:
        """The extra state of each part."""
        return {path: part.get_extra_state() for path, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each part its own back."""
        for path, part in self._parts.items():
            part.set_extra_state(state[path])
