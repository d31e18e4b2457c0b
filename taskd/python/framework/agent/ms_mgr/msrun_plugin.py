"""MSRunPlugin: the way by which MindSpore's msrun before 2.7 drives its agent.

Later ones try `taskd.api.taskd_agent_api` first, which leads to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskd.config.msrun import MsrunConfig
from taskd.msrun.callbacks import OPERATORS, Callbacks

if TYPE_CHECKING:
    from collections.abc import Callable


class MSRunPlugin:
    """What msrun makes, registers its call-backs with, and starts."""

    def __init__(self) -> None:
        """Raises ConfigError: msrun then looks after its processes itself."""
        self._config = MsrunConfig.load()
        self._functions: dict[str, Callable[..., Any]] = {}

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        """Use `func` for `operator`: one of KILL_WORKER, START_ALL_WORKER, ..."""
        self._functions[operator] = func

    def start(self) -> None:
        """Run the workers until the job is over; `taskd.msrun.loop.run` says how it ends.

        Raises:
            Exception: a call-back is missing.
        """
        if not set(OPERATORS) <= self._functions.keys():
            # The very words of the original: msrun's users look for them.
            raise Exception("mindspore hasn't fully registered all callbacks")  # noqa: TRY002
        from taskd.msrun import loop  # noqa: PLC0415

        loop.run(Callbacks(self._functions), self._config)
