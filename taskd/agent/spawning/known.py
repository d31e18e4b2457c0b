"""What is known of some libraries: what they do at their import, and why it may be done for others.

Each entry spares users of that library its import. Imports none of them.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Modules that read the environment or draw random bytes, and keep nothing by which two processes
# may be told apart, but:
HARMLESS = {
    "fsspec.config": "nothing: of a copy of the environment, what begins with FSSPEC_",
    "scipy.stats._distribution_infrastructure": "nothing: the generators are gone after the import",
    "transformers.utils.hub": "SESSION_ID, a part of the User-Agent of downloads",
}


def _rank_of_lightning(module: Any, _environment: Mapping[str, str]) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0  # noqa: SLF001


def _rank_of_torchmetrics(module: Any, environment: Mapping[str, str]) -> None:
    module.rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))


# Modules that keep the rank, and how it is set to that of a fork, as their import would have.
MENDED: Mapping[str, Callable[[Any, Mapping[str, str]], None]] = {
    "lightning.fabric.utilities.rank_zero": _rank_of_lightning,
    "lightning_fabric.utilities.rank_zero": _rank_of_lightning,
    "torchmetrics.utilities.prints": _rank_of_torchmetrics,
}


def mend(environment: Mapping[str, str]) -> None:
    """Set in this fork, whose environment this is, what its parent's imports have read."""
    for name, set_rank in MENDED.items():
        if name in sys.modules:
            with suppress(AttributeError, ValueError):  # another version than those that are known
                set_rank(sys.modules[name], environment)
