"""An exception of the script: what is told of it, and the wait for what follows from it."""

from __future__ import annotations

import logging
import os
import traceback
from typing import TYPE_CHECKING, NoReturn

from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.errors import ConfigError, IncurableError, StateError
from taskd.streams import flush, tell
from taskd.worker.exceptions.communication import is_communication_error
from taskd.worker.exceptions.device import why_broken
from taskd.worker.exceptions.signature import signature
from taskd.worker.exceptions.text import describe, traceback_text
from taskd.worker.process.orders import Where

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.process.orders import Orders
    from taskd.worker.process.uplink import Uplink

log = logging.getLogger(__name__)


class Verdict:
    """One per runtime. Main thread only."""

    def __init__(self, life: Life, orders: Orders, uplink: Uplink) -> None:
        self._life, self._orders, self._uplink = life, orders, uplink

    def await_on(self, error: BaseException, *, clean: bool, may_advance: bool = False) -> None:
        """An exception stopped this rank: report it.

        Returns when a recovery begins; raises it again if the job is given up. Does not return
        where this process can use its device no more: another one has to take its place.
        """
        orders = self._orders
        broken = why_broken()
        if broken:
            self._leave(error, broken)
        with orders.condition:
            if orders.must_gate:  # already interrupted: it is a consequence, or it will come back
                log.info("rank %d: %s, while being interrupted", self._life.rank, describe(error))
                return
            # An Interrupt that comes from here on crosses the report: if that is repeated after the
            # Resume, it is to be told from an exception of the new generation.
            generation = orders.generation
        self._report(error, generation, clean=clean, may_advance=may_advance)
        self.await_interrupt(error)

    def await_interrupt(self, error: BaseException) -> None:
        """Return when a recovery, or the saving of the job, begins; raise it if it is given up."""
        orders = self._orders
        with orders.condition:
            while not orders.must_gate:
                if orders.gave_up is not None or orders.agent_gone:
                    orders.where = Where.OUTSIDE
                    raise error
                orders.condition.wait()

    def _report(
        self, error: BaseException, generation: int, *, clean: bool, may_advance: bool
    ) -> None:
        """An exception left the function, or the vote: say what it was."""
        life = self._life
        fault = Fault(
            FaultKind.COMMUNICATION if is_communication_error(error) else FaultKind.RAISED,
            life.rank,
            life.incarnation,
            describe(error),
            life.records.version,
            signature=signature(error),
            traceback=traceback_text(error),
            is_final=isinstance(error, (ConfigError, StateError)),
            is_incurable=isinstance(error, IncurableError),
        )
        self._uplink.tell(
            events.WorkerRaised,
            "raised",
            generation=generation,
            fault=fault,
            clean=clean,
            snapshots=life.saving.versions(),
            may_advance=may_advance,
        )

    def _leave(self, error: BaseException, broken: str) -> NoReturn:
        """End this process, without what libraries do at its end: they would ask the device."""
        log.error(
            "rank %d: the device refuses every call of this process (%s): it ends, to be replaced",
            self._life.rank,
            broken,
        )
        self.report_uncaught(error)
        tell("".join(traceback.format_exception(error)))
        flush()
        os._exit(1)

    def report_uncaught(self, error: BaseException) -> None:
        """The script ends by an exception outside any recoverable function."""
        life = self._life
        fault = Fault(
            kind=FaultKind.EXITED,
            rank=life.rank,
            incarnation=life.incarnation,
            detail=f"exit 1 after {describe(error)}",
            version=life.records.version,
            signature=signature(error),
            traceback=traceback_text(error),
            exit_code=1,
        )
        self._uplink.tell(events.WorkerUncaught, "uncaught", fault=fault)
