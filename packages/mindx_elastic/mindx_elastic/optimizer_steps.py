"""Counts the steps of all torch optimizers of this process, by torch's own global hooks.

Knows nothing of what is done with the counts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mindx_elastic.errors import MissingFrameworkError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class OptimizerSteps:
    """`begun` and `ended` differ while an optimizer changes parameters."""

    def __init__(self, at_begin: Callable[[], None], at_end: Callable[[], None]) -> None:
        """Both are called for each step. Raises MissingFrameworkError without torch."""
        self.begun = 0
        self.ended = 0
        self._at_begin, self._at_end = at_begin, at_end
        try:
            from torch.optim import optimizer  # noqa: PLC0415
        except ImportError as error:
            raise MissingFrameworkError(
                f"exception_checkpoint saves trainings with torch, which cannot be imported: "
                f"{error}. Install torch; for MindSpore use mindx_elastic.terminating_message."
            ) from error
        try:
            optimizer.register_optimizer_step_pre_hook(self._begin)
            optimizer.register_optimizer_step_post_hook(self._end)
        except AttributeError:
            _log.warning(
                "this torch has no hooks for the steps of all optimizers (2.0 has): whether one is "
                "under way cannot be told, so that only a call of set_config in each step is saved"
            )

    @property
    def is_in_step(self) -> bool:
        """Whether parameters are being changed."""
        return self.begun != self.ended

    def _begin(self, *_: Any) -> None:
        self._at_begin()
        self.begun += 1

    def _end(self, *_: Any) -> None:
        self.ended += 1
        self._at_end()
