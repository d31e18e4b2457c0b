"""The handlers as taskd calls them: who moves this job's state, and saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindio_ttp import replicas, settings
from mindio_ttp.names import RepairType
from mindio_ttp.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mindio_ttp.process import Process
    from mindio_ttp.replicas import Groups
    from taskd.core.commands import Move


class Handover:
    """The state of one entry, in the hands of handlers (`taskd.worker.state.carrier.Carrier`)."""

    def __init__(
        self, process: Process, rank: int, groups: Groups, step_args: Callable[[], Any]
    ) -> None:
        """`step_args`: what handlers are told when they are called."""
        self._process, self._rank, self._groups = process, rank, groups
        self._step_args = step_args

    @property
    def damage(self) -> str:
        """See `Carrier`. Model and optimizer of this rank have to be built anew then."""
        return self._process.damage

    def move(self, step: int, moves: Mapping[int, Move]) -> None:
        """See `Carrier`. The repair handler, on the ranks that send or receive."""
        sources = {rank: move.source for rank, move in moves.items() if move.source is not None}
        receive_as = RepairType.RT_UCE_HIGHLEVEL if self.damage else RepairType.RT_RECV_REPAIR
        info = replicas.repair_info(
            self._rank, sources, len(self._groups), receive_as, RepairType.RT_SEND
        )
        if info is None:
            return
        self._process.repair_step = step
        need_rebuild = bool(self.damage) and self._rank in sources
        self._process.handlers.call_limited(
            "repair", step, need_rebuild, info["dst"], info, self._step_args(),
            self._process.handlers.context("repair"),
        )  # fmt: skip

    def write(self, step: int, writers: tuple[int, ...]) -> None:
        """See `Carrier`. The save handler, on one rank of each part."""
        handlers = self._process.handlers
        self._process.repair_step, self._process.repair_type = step, "dump"
        if not handlers.has("save"):
            from taskd.errors import StateError  # noqa: PLC0415

            message = "there is no save handler (tft_register_save_ckpt_handler)"
            raise StateError(message)
        chosen = replicas.save_info(self._groups, writers)
        if any(self._rank in one["ranks"] for one in chosen):  # type: ignore[operator]
            handlers.call("save", step, chosen, self._step_args(), handlers.context("save"))

    def publish(self, step: int) -> str:
        """See `Carrier`. The rename handler."""
        handlers = self._process.handlers
        if not handlers.has("rename"):
            warn_once(
                "tft_register_rename_handler",
                "there is none: what was saved keeps the name that the save handler gave it",
            )
            return "the checkpoint of the script's save handler"
        is_for_mindspore = settings.is_for_mindspore()
        handlers.call(
            "rename", step, handlers.context("rename") if is_for_mindspore else self._step_args()
        )
        return "the checkpoint that the script's rename handler has named"
