"""Damages the box of a living worker at random, and reads it with every reader.

A real death alarm watches the box meanwhile.

    python tests/native/fuzz_black_box.py [SECONDS [SEED]]

The process that reads must survive, no reader may raise, the file may not become shorter, and no
death may be reported: the worker lives. What an agent makes of the box must reach the manager: the
marks of a heartbeat, and the report of a death, which are built by the agent's own code, encoded,
decoded, and taken in by the manager's machine, for which one job recovers after the other. By hand
for as long as one likes; a test runs it for a few seconds.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from taskd.agent.vitals.endings import Endings
from taskd.agent.vitals.progress import Vitals
from taskd.core import events
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from taskd.core.worker_state import WorkerState
from taskd.native import box_layout as layout
from taskd.native.black_box import LONG_PHASES, BlackBox
from taskd.native.collectives import Collectives
from taskd.native.death_alarm import DeathAlarm
from taskd.wire import codec, messages, translate
from tests.native.programs import GUARD, READ, ending, expect, is_readable, start, wait_until

# Where damage begins, more often than elsewhere: the structures that readers follow.
STRUCTURES = (
    0,
    64,
    layout.OFFSET_PID,
    layout.OFFSET_PHASE_NS,
    layout.WORDS_OFFSET_STATE,
    layout.LAYOUT_OFFSET,
    layout.EXTRAS_OFFSET,
    layout.EXTRAS_OFFSET + layout.EXTRAS_BYTES,
    layout.EXTRAS_OFFSET + 2 * layout.EXTRAS_BYTES,
    layout.COMMON_OFFSET,
    layout.COLLECTIVES_OFFSET,
    layout.COLLECTIVES_OFFSET + layout.CALLS_OFFSET,
    layout.TEXT_OFFSET,
)
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    5,
    -1,
    64,
    4096,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    -(1 << 63),
    -(1 << 31),
)
ROUNDS_PER_WATCH = 50


def readers(box: BlackBox) -> dict[str, object]:
    """Everything public that reads: properties, and methods that need no argument.

    What is added later is found by itself.
    """
    found = {}
    for name, member in inspect.getmembers(BlackBox):
        if name.startswith("_") or name in {"fd", "close", "create"}:
            continue
        if isinstance(member, property):
            found[name] = lambda name=name: getattr(box, name)
        elif inspect.isfunction(member) and not name.startswith(("mark", "write", "begin")):
            needed = [
                p for p in inspect.signature(member).parameters.values() if p.default is p.empty
            ]
            if len(needed) == 1:
                found[name] = getattr(box, name)
    for phase in LONG_PHASES:
        found[f"slowest_long_s {phase}"] = lambda phase=phase: box.slowest_long_s(phase)
    return found


def damage(dice: random.Random, fd: int) -> None:
    """Noise, a number where a number is, or many bytes of one value."""
    start_at = dice.choice(STRUCTURES) if dice.random() < 0.7 else dice.randrange(layout.BOX_BYTES)
    at = (
        start_at + 8 * dice.randrange(12)
        if dice.random() < 0.8
        else start_at + dice.randrange(2048)
    )
    kind = dice.randrange(3)
    if kind == 0:
        noise = dice.randbytes(dice.choice((1, 8, 64, 1024)))
    elif kind == 1:
        noise = struct.pack("=q", dice.choice(NUMBERS))
    else:
        noise = bytes([dice.randrange(256)]) * dice.choice((8, 4096))
    os.pwrite(fd, noise[: max(0, layout.BOX_BYTES - at)], at)


class Watched:
    """Rank 1 of an agent, whose box is being damaged."""

    def __init__(self, box: BlackBox) -> None:
        self.incarnation, self.pid, self.box = 0, os.getpid(), box


class Manager:
    """What an agent says to it goes over the wire, and has to be taken in."""

    def __init__(self) -> None:
        self.now = 100.0
        self.taken = 0
        self.timeouts = Timeouts.derive(30.0)
        self.machine = RecoveryMachine("job", self.timeouts)
        workers = tuple(
            events.WorkerReport(rank, 0, WorkerState.RUNNING, True, 5, True, True)
            for rank in range(2)
        )
        self.hear(events.AgentRegistered(0.0, "c", 0, "a", 1, 2, 100, 0, 0, workers))
        assert self.machine.phase is JobPhase.RUNNING

    def pass_on(self, message: messages.Message) -> messages.Message:
        """Over the wire, as the manager sees it: anything that it refuses raises."""
        self.now += 0.01
        self.taken += 1
        envelope = codec.Envelope("job", "agent", 0, None, "a", 0, self.taken, "c")
        envelope, message = codec.decode(codec.encode(envelope, message))
        return message

    def beat(self, marks: tuple) -> None:
        message = self.pass_on(messages.Heartbeat(marks))
        assert isinstance(message, messages.Heartbeat)
        self.machine.handle(events.AgentHeard(self.now, "c", 0, message.marks))
        self.machine.check()

    def hear(self, event: events.Event) -> list:
        message = self.pass_on(translate.event_to_message(event))
        envelope = codec.Envelope("job", "agent", 0, None, "a", 0, 0, "c")
        answers = self.machine.handle(translate.message_to_event(envelope.cause, message, self.now))
        self.machine.check()
        return answers


def report(box: BlackBox, vitals: Vitals, endings: Endings, dice: random.Random) -> int:
    """A heartbeat and a death of rank 1 as the agent tells them, to a manager.

    Rank 0 is healthy, and the job goes on. Returns messages.
    """
    manager = Manager()
    Collectives(box).calls()
    for later in range(3):
        manager.beat(vitals.look(time.monotonic() + later, 1.0, {1: Watched(box)}))
    # it was taken for hanging, and is being replaced: a damaged box may say so
    if manager.machine.phase is not JobPhase.RUNNING:
        return manager.taken
    node = NodeMachine(0, (0, 1), manager.timeouts, world_size=2)
    node.handle(events.ManagerJoined(manager.now, "c", 0, 0))
    for rank in range(2):
        node.handle(events.WorkerStarted(manager.now, "c", rank, 0, 10))
        node.handle(events.WorkerDeclared(manager.now, "c", rank, 0, True))
    versions, phase = tuple(sorted(box.read_extras())), box.phase.name.lower()
    told = []
    if dice.random() < 0.5:
        told += node.handle(
            events.AlarmRang(manager.now, "c", 1, 0, manager.now, box.version, phase, versions)
        )
    status = dice.choice((-9, -11, 1, 139))
    words = endings.words((1, 0), status, box, time.monotonic())
    told += node.handle(
        events.WorkerExited(manager.now, "c", 1, 0, status, box.version, phase, versions, words)
    )
    answers = [
        answer
        for command in told
        if isinstance(event := getattr(command, "event", None), events.Event)
        for answer in manager.hear(event)
    ]
    kinds = {type(answer).__name__ for answer in answers}
    expected = {"Interrupt", "ReplaceWorker"}
    assert expected <= kinds or phase == "exiting" or "RestartGroup" in kinds, (kinds, told)
    return manager.taken


OWNER_WORD_OFFSET = 64  # csrc/include/taskd.h
OWNER_DIED = 0x40000000  # FUTEX_OWNER_DIED of <linux/futex.h>


def no_watch_is_left() -> bool:
    """Threads of the library that watch have ended."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
        except OSError:
            continue
    return "taskd-watch" not in names


def main(seconds: float = 60, seed: int = 1) -> int:
    dice = random.Random(seed)
    box, alarm = BlackBox.create(), DeathAlarm()
    worker = start(GUARD + READ, box.fd)
    rounds = watches = told = 0
    vitals, endings = Vitals(), Endings()
    with ending(worker):
        expect(worker, "guarded True" if alarm.available else "guarded False")
        box.write_extras(1, dice.randbytes(20_000), common=b"common")
        box.write_extras(2, dice.randbytes(20_000), pending=True)
        box.write_layout(b"layout")
        whole = box.read(0, layout.BOX_BYTES)
        every = readers(box)
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            for _ in range(dice.randrange(1, 4)):
                damage(dice, box.fd)
            for name, read in every.items():
                try:
                    read()
                except Exception as error:
                    print(f"seed {seed}, round {rounds}: {name} raised {error!r}")
                    raise
            told += report(box, vitals, endings, dice)
            if rounds % ROUNDS_PER_WATCH == 0:
                # It may sleep, or have given up; unwatch wakes it to look at what there is now.
                watches += alarm.watch(rounds, box)
                damage(dice, box.fd)
                alarm.unwatch(rounds)
                assert not is_readable(alarm.fd, 0), (
                    f"seed {seed}, round {rounds}: a death was reported, the worker lives"
                )
                os.pwrite(
                    box.fd,
                    whole[: layout.COLLECTIVES_OFFSET] if dice.random() < 0.1 else whole[:4096],
                    0,
                )
            rounds += 1
        for shorter in (0, 4096, layout.BOX_BYTES - 1, layout.BOX_BYTES + 1):
            try:
                os.ftruncate(box.fd, shorter)
            except PermissionError:
                continue
            raise AssertionError(f"the box could be cut to {shorter} bytes")
        assert not is_readable(alarm.fd, 0.05), "a death was reported, the worker lives"
        assert worker.poll() is None
        assert os.fstat(box.fd).st_size == layout.BOX_BYTES
    # Those who sleep on a word that had lost its mark are woken by hand, as the agent does when the
    # worker is gone. In a box whose header is damaged at this moment nobody is watched, and nobody
    # would be woken. The owner's word is as the kernel leaves it: with that of a living worker they
    # would sleep again.
    os.pwrite(box.fd, whole[:4096], 0)
    os.pwrite(box.fd, struct.pack("=I", OWNER_DIED), OWNER_WORD_OFFSET)
    alarm.watch(rounds, box)
    alarm.unwatch(rounds)
    wait_until(no_watch_is_left, "the end of all watches")
    print(
        f"{rounds} rounds, {len(every)} readers, {told} messages to a manager, {watches} "
        "watches: no error, no false death, none refused"
    )
    endings.close()
    alarm.close()
    box.close()
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # that a damaged box is refused is what is expected here
    raise SystemExit(
        main(*(kind(text) for kind, text in zip((float, int), sys.argv[1:], strict=False)))
    )
