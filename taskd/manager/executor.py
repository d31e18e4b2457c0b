"""Events into the machine, and its commands into messages, log lines and records."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.errors import LocalProtocolError
from taskd.manager.records import describe_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.clock import Clock
    from taskd.log import Identity
    from taskd.manager.guarded import GuardedMachine
    from taskd.manager.held_records import HeldRecords
    from taskd.manager.outbox import Outbox

log = logging.getLogger(__name__)

_BESIDE = (commands.Pair, commands.ReturnMirrors)  # recoveries go on without them


class Executor:
    """`result`: whether the job succeeded; None: it is not over. `ended`: how it ended, if so."""

    def __init__(
        self,
        guarded: GuardedMachine,
        outbox: Outbox,
        records: HeldRecords,
        clock: Clock,
        identity: Identity | None = None,
    ) -> None:
        """`identity`: the log prefix, whose generation is kept up to date."""
        self.result: bool | None = None
        self.ended: commands.EndJob | None = None
        self._guarded = guarded
        self._outbox = outbox
        self._records = records
        self._clock = clock
        self._identity = identity

    def feed(self, event: events.Event) -> None:
        """Hand an event to the machine and execute what it answers."""
        if isinstance(event, events.WorkerExitKnown | events.WorkerLost):
            self._records.learn(event.fault)
        self.execute_all(self._guarded.handle(event))

    def execute_all(self, orders: list[commands.Command]) -> None:
        """Execute each command; one that fails does not cost the others."""
        dropped = None
        for command in orders:
            with self._guarded.surviving(f"the order {type(command).__name__}"):
                try:
                    self.execute(command)
                except LocalProtocolError as error:
                    if isinstance(command, _BESIDE):
                        raise
                    dropped = error
        if dropped is not None:
            self._give_up(dropped)
        if self._identity is not None:
            self._identity.generation = self._guarded.machine.generation

    def _give_up(self, error: LocalProtocolError) -> None:
        """An order of the recovery is too long to be sent."""
        reason = f"an order fits into no message: {error}"
        self.feed(events.OrderDropped(self._clock.now(), "order", reason))

    def execute(self, command: commands.Command) -> None:
        """Execute one command. Raises TypeError for one that is not a manager's."""
        match command:
            case (
                commands.ReplaceWorker()
                | commands.KillWorker()
                | commands.Publish()
                | commands.Pair()
                | commands.ReturnMirrors()
            ):
                self._outbox.order(command, [command.node_rank])
            case commands.RepeatOrder():
                self._outbox.order(command.order, [command.node_rank])
            case commands.Interrupt() | commands.Advance() | commands.Release() | commands.Dump():
                self._outbox.order(command)
            case commands.Resume() | commands.RestartGroup():
                self._begin_record()
                self._outbox.order(command)
            case commands.GiveUp():
                self._records.write_all()
                _log_end(command)
                self._outbox.order(command)
            case commands.RecordRecovery():
                self._records.take(command.record)
                self._guarded.write_story()
            case commands.EndJob():
                self._end(command)
            case (
                commands.ReportStraggler()
                | commands.ReportNoProgress()
                | commands.ReportNotJoined()
                | commands.ReportWorld()
                | commands.ReportNoBuddy()
            ):
                _report(command)
            case _:
                raise TypeError(f"{type(command).__name__} is no command for a manager")

    def _begin_record(self) -> None:
        """The end of this recovery is yet to be seen, which another manager may do."""
        with self._guarded.surviving("the record of a recovery that is under way"):
            why = "the manager ended before every rank was known to have made a new step"
            self._records.begin(self._guarded.machine.unfinished_record(why))

    def depose(self, reason: str) -> None:
        """The agents obey another manager, or are about to elect one."""
        self.result = True
        log.warning("this manager ends, training goes on: %s", reason)

    def desert(self) -> None:
        """No agent is heard any more, and they could elect another manager."""
        self.result = True
        nodes = self._guarded.machine.membership.nodes
        ended = [rank for rank, node in sorted(nodes.items()) if node.outcome == "succeeded"]
        if ended:
            log.warning(
                "this manager ends: node %d has ended well, and no other is heard any more. If "
                "they were lost after their training, nothing is missing: see what torchrun says "
                "on each of them",
                ended[0],
            )
            return
        log.warning(
            "this manager ends: none of its agents is heard any more. They have elected another "
            "one, which goes on; or all nodes are lost: then start the job again"
        )

    def set_profiling(self, wanted: int, node_ranks: Iterable[int] | None = None) -> None:
        """Tell the agents of these nodes, or of all, which domains are to be profiled."""
        generation = self._guarded.machine.generation
        self._outbox.order(commands.SetProfiling("profiling", generation, wanted), node_ranks)

    def _end(self, command: commands.EndJob) -> None:
        self.result, self.ended = command.succeeded, command
        self._records.write_all()
        if command.left_alone:
            log.warning(
                "this manager ends: %s. Training goes on as plain torchrun does it, and torchrun "
                "tells how it ends",
                command.reason,
            )
            return
        log.log(
            logging.INFO if command.succeeded else logging.ERROR,
            "the job has %s: %s",
            "succeeded" if command.succeeded else "failed",
            command.reason,
        )


def _report(command: commands.Command) -> None:
    """What is only said."""
    match command:
        case commands.ReportStraggler():
            log.warning(
                "rank %d is slower than the others: %.0f ms per step in %s, they %.0f ms",
                command.rank,
                1000 * command.own_s,
                command.phase,
                1000 * command.others_s,
            )
        case commands.ReportNoProgress():
            log.warning(
                "the job gets no further: %s. What fails is in recoveries.jsonl, with "
                "the tracebacks",
                command.text,
            )
        case commands.ReportNotJoined():
            log.warning("not all nodes have registered: %s", command.text)
        case commands.ReportNoBuddy():
            log.warning(
                "no snapshot can be mirrored: all nodes are on one host (%s), which "
                "would take its mirrors along. Training goes on",
                command.host,
            )
        case commands.ReportWorld(is_smaller=True):
            log.warning("elastic-training: %s", command.text)
        case commands.ReportWorld():
            log.info("elastic-training: %s", command.text)


def _log_end(command: commands.GiveUp) -> None:
    log.error("the job is given up: %s", command.reason)
    if command.fault is not None:
        log.error("the cause: %s", describe_fault(command.fault))
        for line in (command.fault.traceback or "").splitlines():
            log.error("  %s", line)
