"""What one training process has said through this package, and what its training is at.

Owns the record; `mindio_ttp.training` acts on it. Needs neither torch nor a job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mindio_ttp.handlers import Handlers

if TYPE_CHECKING:
    from mindio_ttp.replicas import Groups
    from mindio_ttp.reports import Rule


class State(Protocol):
    """The counted steps of the present entry, see `taskd.worker.carried_state.CarriedState`."""

    @property
    def step(self) -> int:
        """The newest step that is finished."""

    def refuse(self, reason: str) -> None:
        """This copy cannot be gone on from."""

    def spoil(self, reason: str) -> None:
        """What this rank holds is damaged."""

    def begin_update(self) -> None:
        """The optimizer begins to write."""

    def end_update(self, number: int) -> None:
        """It has written."""


@dataclass
class Processor:
    """What `tft_init_processor` was told."""

    rank: int
    world_size: int
    is_uce_enabled: bool
    is_started: bool = False


@dataclass
class Process:
    """Of this process, whatever jobs and entries come and go."""

    processor: Processor | None = None
    has_controller: bool = False
    replicas: Groups | None = None
    handlers: Handlers = field(default_factory=Handlers)
    rules: list[Rule] = field(default_factory=list)
    framework: str | None = None  # of set_mindio_export_version
    step_args: Any = None
    state: State | None = None  # None: no step is counted
    is_updating: bool = False
    # What is wrong with the memory of this rank; only a repair that has come to its end mends it.
    damage: str = ""
    devices: dict[str, int] = field(default_factory=dict)  # see `mindio_ttp.devices`
    refusal: str = ""  # why no copy of this process can be gone on from, in any entry
    # It is new, and takes the place of one that died; and the script has asked whether it is.
    is_replacement: bool = False
    has_asked: bool = False
    is_preparing: bool = False  # the script runs up to "ARF FINISH"
    repair_step: int = 0  # of the present recovery, or of the newest if there is none
    repair_type: str = "unknow"

    def forget_repair(self) -> None:
        """Another fault: what the newest recovery was is of no use for this one."""
        self.repair_step, self.repair_type = 0, "unknow"


class Prepared(BaseException):
    """The script of a replacement has come as far as it can before its state is repaired.

    No Exception, so that the script does not catch it.
    """


_process = Process()


def current() -> Process:
    """The record of this process."""
    return _process


def reset() -> Process:
    """Begin it anew."""
    global _process  # noqa: PLW0603
    _process = Process()
    return _process
