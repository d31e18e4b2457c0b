"""The gate: where the main thread waits while a recovery goes on.

Owns the report of what this process holds, the wait for `Resume`, what is done meanwhile, and how
the process enters the new generation. And the wait at the end, until every rank has returned.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from taskd.core import events
from taskd.native import collectives
from taskd.native.black_box import Phase
from taskd.worker.life import Plan
from taskd.worker.process import world
from taskd.worker.process.orders import Where
from taskd.worker.process.unwinding import ABORTED_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.core import commands
    from taskd.worker.life import Life
    from taskd.worker.process.groups import Groups
    from taskd.worker.process.orders import Orders
    from taskd.worker.process.uplink import Uplink
    from taskd.worker.saving.dumping import Dumping


log = logging.getLogger(__name__)


class Gate:
    """One per runtime. Main thread only."""

    def __init__(self, life: Life, orders: Orders, uplink: Uplink, groups: Groups) -> None:
        self._life, self._orders, self._uplink, self._groups = life, orders, uplink, groups
        self._dumping: Dumping | None = None

    def wait(
        self,
        *,
        version: int | None,
        clean: bool,
        reason: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bool:
        """If a recovery is going on: report, wait for `Resume`, enter its generation. Else False.

        Args:
            version: that this process holds; `clean`: whether as a whole; `reason`: why not.
            meanwhile: work that fits into the wait, after the report.

        Raises:
            SystemExit: the job is over.
        """
        orders, life = self._orders, self._life
        while True:
            with orders.condition:
                if not orders.must_gate:
                    return False
                generation = orders.generation
                orders.where = Where.WAITING
            life.mark(Phase.PAUSED)
            for problem in life.saving.verify():
                log.warning(
                    "rank %d does not use what a lost agent has left of it in node memory: %s",
                    life.rank,
                    problem,
                )
            self._uplink.tell(
                events.WorkerPaused,
                "paused",
                generation=generation,
                version=version,
                clean=clean,
                reason=reason,
                snapshots=life.saving.versions(),
            )
            meanwhile()
            if not orders.may_finish:
                self._groups.await_abort(ABORTED_S)
            if life.keeps_groups:
                self._groups.set_aside()
            else:
                self._groups.retire()
            resume = self._await_resume(generation)
            if resume is not None:
                self._begin(resume)
                return True

    def _await_resume(self, generation: int) -> commands.Resume | None:
        """The `Resume` of `generation`, or None if a newer interrupt made it void.

        Saves the state meanwhile, if that is ordered.
        """
        orders = self._orders
        while True:
            with orders.condition:
                while orders.save is None:
                    if orders.resume is not None:
                        resume, orders.resume = orders.resume, None
                        orders.must_gate = False
                        # a newer interrupt aborts what is made from here on
                        orders.where = Where.OUTSIDE
                        return resume
                    if orders.generation != generation:
                        return None
                    orders.raise_if_over(self._life.rank)
                    orders.condition.wait()
                order, orders.save = orders.save, None
            self._save(order)

    def _save(self, order: commands.Dump | commands.Publish) -> None:
        """The job ends.

        Write this rank's part of its last checkpoint, or give the whole its name.
        """
        from taskd.worker.saving.dumping import Dumping  # noqa: PLC0415

        if self._dumping is None:
            self._dumping = Dumping(self._life, self._life.job_id)
        stage, detail = self._dumping.obey(world.in_world(order, self._life))
        if stage:
            self._uplink.tell(
                events.WorkerDumped,
                "dumped",
                generation=order.generation,
                stage=stage,
                detail=detail,
            )

    def _begin(self, resume: commands.Resume) -> None:
        """Enter the generation of `resume`."""
        life = self._life
        if life.keeps_groups:
            self._groups.take_out()
        life.plan = Plan(
            resume.generation,
            resume.version,
            {move.rank: move for move in resume.moves},
            awaits_commit=True,
        )
        life.interrupts.pending = None
        life.interrupts.is_held = False
        world.enter(life, resume.active)
        if resume.store:
            self._groups.move(resume.store)
        self._groups.begin(resume.generation)
        collectives.reset()
        if life.box is not None:
            life.box.mark_generation(resume.generation)

    def report_recovery(self) -> None:
        """The first version of the generation is committed: say how long that took."""
        life, resumed_at, now = self._life, self._orders.resumed_at, time.monotonic()
        world.report_step(life)
        groups_at = self._groups.created_at or resumed_at
        state_at = max(life.records.restored_at or groups_at, groups_at)
        self._uplink.tell(
            events.WorkerRecovered,
            "recovered",
            generation=life.plan.generation,
            version=life.records.version or 0,
            groups_s=max(0.0, groups_at - resumed_at),
            state_s=state_at - groups_at,
            first_step_s=now - state_at,
            source=life.records.restored_from,
        )

    def await_release(self, version: int | None) -> bool:
        """The function returned here. True: it has on all ranks.

        False: a recovery needs us once more.

        Raises:
            SystemExit: the job is over.
        """
        orders, life = self._orders, self._life
        life.mark(Phase.RETURNED)
        with orders.condition:
            if orders.must_gate:
                return False
            generation = orders.generation
        self._uplink.tell(events.WorkerReturned, "returned", generation=generation, version=version)
        with orders.condition:
            while not orders.released:
                if orders.must_gate:
                    return False
                orders.raise_if_over(life.rank)
                orders.condition.wait()
        orders.where = Where.OUTSIDE
        return True
