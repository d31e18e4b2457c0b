"""A training state whose content another library moves and saves: the face for such libraries.

As a TrainState it counts steps, holds interrupts off while an optimizer writes, votes where the
state is sharded, and takes part in the cut and in the emergency checkpoint. Its content is in the
hands of a `taskd.worker.state.carrier.Carrier`. Checkpoints are that library's, too: none is read
or written here. It is the only state of its recoverable function.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from taskd.config.job import fault_timeout
from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.core.timeouts import Timeouts
from taskd.errors import StateError
from taskd.native.black_box import Phase
from taskd.worker.life import current
from taskd.worker.objects.roles import Roles
from taskd.worker.restore.restoration import Restored, restore
from taskd.worker.state import step as training_step
from taskd.worker.state.agreement import Agreement
from taskd.worker.state.holding import Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskd.worker.life import Life
    from taskd.worker.state.carrier import Carrier

_NO_STEP = "no step has been finished in this process yet"


class CarriedState:
    """One per entry of the recoverable function; made in there, in a taskd job.

    Outside of one, `taskd.worker.life.current()` is None, there is nothing to make.
    """

    def __init__(self, name: str, carrier: Carrier, *, shard_id: str = "") -> None:
        """`shard_id`: equal on the ranks that hold the same part; "": all hold everything.

        Raises:
            StateError: outside a recoverable function, or beside another state.
        """
        life = current()
        if life is None or not life.interrupts.in_recoverable or life.records.states:
            message = (
                f"CarriedState({name!r}) is the only state of a recoverable function of a taskd job"
            )
            raise StateError(message)
        self._life = life
        self._holding = Holding(name, Roles.sort(name, {}), shard_id or None)
        self._holding.carrier = self._carrier = carrier
        self._refusal = ""
        life.keeps_groups = True
        life.records.states[name] = self._holding

    @property
    def step(self) -> int:
        """The newest step that is finished, by the numbers of the script; 0: none is known."""
        return self._holding.step

    def restore(self) -> Restored:
        """In a recovery, let the carrier move the content. To be called before the first step.

        At a start there is nothing to move; until the first step is finished, a fault starts all
        processes anew, as nobody knows which step the script has begun with.

        Raises:
            RuntimeError: this rank is damaged, and its plan was made before that was known.

        And what the carrier raises.
        """
        life, damage = self._life, self._carrier.damage
        if damage and life.plan.version is not None and not life.plan.receives(life.rank):
            self.spoil(damage)
            message = f"rank {life.rank}: {damage}; and it is not to receive what another one holds"
            raise RuntimeError(message)
        restored = restore(life, self._holding)
        if restored.version is None:
            self._holding.problem = _NO_STEP
        return restored

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Within, this process is not in a step yet: it may stand as long as one that starts."""
        self._life.mark(Phase.ENTERED)
        yield
        self._life.mark(Phase.STEP)

    def refuse(self, reason: str) -> None:
        """Instead of `restore()`: this copy cannot be gone on from, now or later in this entry.

        A fault starts all processes anew. Steps are counted all the same.
        """
        self._refusal = self._holding.problem = reason
        records = self._life.records
        records.version = records.version or 0
        self._holding.is_restored = True

    def spoil(self, reason: str) -> None:
        """What this rank holds is damaged; in a recovery it receives what another one holds."""
        parked = self._life.records.parked.get(self._holding.name)
        for holding in (self._holding, parked):  # parked: nothing has been restored from it yet
            if holding is not None:
                holding.problem = reason

    def begin_update(self) -> None:
        """The optimizer begins to write. Interrupts are held off until `end_update`.

        Raises:
            taskd.Interrupted: a recovery waits for this process; let it pass.
        """
        if not self._holding.is_half_way:
            training_step.begin_update(self._life, self._holding)

    def end_update(self, number: int) -> None:
        """It has written: the step `number` is finished, and the copy is whole again.

        The version is the number of the step, unless the script has gone back: versions only grow.

        Raises: as `begin_update`.
        """
        holding, records = self._holding, self._life.records
        version = max(number, (records.version or 0) + 1)
        holding.step, records.version = number - 1, version - 1
        holding.problem = self._refusal
        if self._carrier.damage:  # in this order: a thread that reports it writes it there first
            holding.problem = self._carrier.damage
        training_step.commit(self._life, holding)


def hold_interrupts(life: Life) -> None:
    """From here to the end of the entry no interrupt is raised, however it is left."""
    life.interrupts.is_held = True


def ask_all(life: Life, subject: str, text: str, *, within_s: float | None) -> list[str]:
    """The texts of all ranks that are not "", in their order; every rank calls it at this place.

    It needs the store of the default process group, and no collective. An interrupt may be raised
    meanwhile. `within_s` None: as long as a new process may take until it has come to its function.

    Raises:
        TimeoutError: not all ranks have come here within `within_s` seconds. It is raised on all
            ranks, also on those that come later.
    """
    if within_s is None:
        within_s = Timeouts.derive(fault_timeout(os.environ)).start_s
    return Agreement(life, subject).gather_within(text, within_s)


def report_overdue(life: Life, detail: str) -> None:
    """From any thread: the main thread does not come back from what others may wait for.

    It is a fault: all ranks are called, and the process of one that does not come in the time of a
    pause is replaced. `detail`: what it is in, and for how long.
    """
    fault = Fault(
        FaultKind.HANG,
        life.rank,
        life.incarnation,
        detail,
        version=life.records.version,
        signature="overdue",
    )
    life.supervisor.tell(
        events.WorkerRaised,
        "overdue",
        generation=life.plan.generation,
        fault=fault,
        clean=True,  # it has not stopped, and says then what it holds
        snapshots=life.saving.versions(),
        may_advance=True,
    )


def on_stop(life: Life, function: Callable[[], None]) -> None:
    """Have `function` called, in a thread of its own, when the main thread is to leave its step.

    For devices on which the main thread can wait where no signal reaches it. Not while an optimizer
    writes: that is finished first.
    """
    life.stop_device = function
