"""What a MindSpore worker has of its agent: fetched at the door, held by one thread.

    agent ── black box, channel, life pipe, snapshots ──►  Link   (taskd.msrun.door)
          ◄── WorkerReady, WorkerRecovered, WorkerDraining, WorkerUncaught

The thread marks four times a second that Python runs, tells the agent of a SIGTERM that did not
come from it, and ends the process when the agent is gone. It knows nothing of MindSpore, whose
calls hold the interpreter lock only while process groups are made.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.errors import NativeLibraryError
from taskd.log import stand_in
from taskd.native import death_alarm, last_words
from taskd.native.arenas import Arenas
from taskd.native.black_box import BlackBox, Phase
from taskd.threads import start_thread
from taskd.transport.channel import Channel
from taskd.wire import codec, translate
from taskd.worker.exceptions.signature import signature
from taskd.worker.exceptions.text import describe, traceback_text
from taskd.worker.process.sigterm import Sigterm

if TYPE_CHECKING:
    from types import TracebackType

    from taskd.core.events import WorkerEvent

log = logging.getLogger(__name__)

_BEAT_S = 0.25
_ANSWER_S = 30.0  # the agent answers within a turn of its loop: then it is not there any more
_ANSWER_BYTES = 65536
_MAX_DESCRIPTORS = 16


@dataclass(frozen=True)
class Parcel:
    """What the agent has given this process."""

    values: dict[str, Any]
    descriptors: dict[str, int]


def fetch(door: str, rank: int | None) -> Parcel | None:
    """Ask at the door; None: there is nothing for this process (said in the log)."""
    if not door or rank is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(_ANSWER_S)
        try:
            asking.connect(f"\0{door}")
            asking.send(json.dumps({"rank": rank}).encode())
            data, numbers, _, _ = socket.recv_fds(asking, _ANSWER_BYTES, _MAX_DESCRIPTORS)
            said = json.loads(data)
        except (OSError, ValueError) as error:
            log.warning(
                "rank %d has no link to its agent, which may be gone: training goes on without "
                "snapshots that outlive it (%s)",
                rank,
                error,
            )
            return None
    if "refused" in said:
        log.info("rank %d: the agent gives this process nothing: %s", rank, said["refused"])
        return None
    names = said.pop("names")
    for number in numbers:
        os.set_inheritable(number, False)
    return Parcel(said, dict(zip(names, numbers, strict=True)))


class Link:
    """See the module. Made in the main thread, once per process."""

    def __init__(self, parcel: Parcel) -> None:
        """Raises NativeLibraryError: the agent has another version of taskd."""
        values, descriptors = parcel.values, parcel.descriptors
        self.rank: int = values["rank"]
        self.world_size: int = values["world_size"]
        self.incarnation: int = values["incarnation"]
        self.generation: int = values["generation"]
        self.job_id: str = values["job_id"]
        self._node_rank: int = values["node_rank"]
        self.box = BlackBox.attach(descriptors["box"])
        self.box.begin(os.getpid(), self.incarnation)
        self.box.mark_generation(self.generation)
        arenas = [name for name in sorted(descriptors) if name.startswith("arena")]
        self.arenas = Arenas([descriptors[name] for name in arenas])
        self._channel = Channel(descriptors["channel"])
        self._guarded = death_alarm.guard(self.box, descriptors["life"])
        os.close(descriptors["life"])
        last_words.start(self.box)
        self._pid, self._sequence, self._lock = os.getpid(), 0, threading.Lock()
        self._sigterm = Sigterm()
        self._sigterm.watch()
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        os.register_at_fork(after_in_child=self._disarm)
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable when the interpreter is to end
        end = functools.partial(os.eventfd_write, self._end_fd, 1)
        start_thread("taskd", self._listen, stop=end)
        self.tell(events.WorkerReady, "ready", guarded=self._guarded)

    def tell(self, kind: type[WorkerEvent], cause: str, **fields: Any) -> None:
        """Report an event. Any thread may; a lost agent ends this process by other means."""
        now = time.monotonic()
        event = kind(
            now=now, cause=f"{cause}:{self.rank}.{self.incarnation}:{now:.6f}", rank=self.rank,
            incarnation=self.incarnation, **fields,
        )  # fmt: skip
        with self._lock:
            self._sequence += 1
            envelope = codec.Envelope(
                job_id=self.job_id, role="worker", node_rank=self._node_rank, rank=self.rank,
                incarnation=self.incarnation, generation=self.generation,
                sequence=self._sequence, cause=event.cause,
            )  # fmt: skip
            sent = self._channel.send(codec.encode(envelope, translate.event_to_message(event)))
        if not sent:
            log.warning("rank %d: the agent did not take %s", self.rank, kind.__name__)

    def report_first_step(self, went_on_from: int, groups_s: float, first_step_s: float) -> None:
        """The first step since the group was restarted is committed."""
        self.tell(
            events.WorkerRecovered, "first step", generation=self.generation, version=went_on_from,
            groups_s=groups_s, state_s=0.0, first_step_s=first_step_s,
        )  # fmt: skip

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fd, select.POLLIN)
        poller.register(self._end_fd, select.POLLIN)
        poller.register(self._sigterm.fd, select.POLLIN)
        while not self._channel.closed:
            if (self._end_fd, select.POLLIN) in poller.poll(_BEAT_S * 1000):
                return
            self.box.mark_python(waiting=False)
            self._channel.receive()  # orders are for workers that are recovered in place
            if self._sigterm.read() and not self._channel.closed:
                self.tell(events.WorkerDraining, "sigterm")
        self._sigterm.step_aside()
        if not self._guarded and os.getpid() == self._pid:
            death_alarm.end_own_process_group()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The script ends by an exception: what it was is told, for the job's record."""
        if os.getpid() == self._pid and isinstance(error, Exception):
            detail, text = f"exit 1 after {describe(error)}", traceback_text(error)
            fault = Fault(
                kind=FaultKind.EXITED, rank=self.rank, incarnation=self.incarnation, detail=detail,
                version=self.box.version, signature=signature(error), traceback=text, exit_code=1,
            )  # fmt: skip
            self.tell(events.WorkerUncaught, "uncaught", fault=fault)
            self.box.mark_phase(Phase.EXITING)
        self._hook(kind, error, trace)

    def _disarm(self) -> None:
        """In a forked child (a data set's process): no worker."""
        with suppress(OSError):
            self._channel.close()


_held: list[Link | None] = []


def of_process(door: str, rank: int | None) -> Link | None:
    """The link of this process, made by the first call; None: it has none."""
    if not _held:
        _held.append(None)
        stand_in()
        parcel = fetch(door, rank)
        try:
            _held[0] = None if parcel is None else Link(parcel)
        except NativeLibraryError as error:
            log.warning("rank %s goes on without its agent: %s", rank, error)
    return _held[0]
