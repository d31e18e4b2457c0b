"""Says odd things to a real manager.

Messages of every type, well formed, with values that no process of ours would send.

    python tests/unit/fuzz_manager.py [MESSAGES [SEED]]

Two ways. A stranger says them while a job trains: the job must not notice. And an agent of the job
does: then the job may end, the manager must not stumble, time must go on, and what it was told must
leave every invariant of its machine true. By hand for as many messages as one likes; a test says a
few thousand.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import random
import sys
import tempfile

import msgpack

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.core.marks import GroupMark, Mark
from taskd.core.phase import JobPhase
from taskd.core.votes import Roster, Voter, Witness
from taskd.core.worker_state import WorkerState
from taskd.manager.service import Service
from taskd.testing.clock import FakeClock
from taskd.transport.memory import MemoryDealer, MemoryNetwork, MemoryRouter
from taskd.wire import batch, codec, messages, schema

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    1000,
    -1,
    -7,
    1 << 20,
    (1 << 20) + 1,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    schema.MAX_CLAIM,
    schema.MAX_CLAIM + 1,
    schema.MAX_INTEGER,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    -0.5,
    1e9,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
TEXTS = (
    "",
    "zombie",
    "lost",
    "succeeded",
    "failed",
    "step",
    "boot",
    "checkpoint",
    "whole",
    "published",
    "\0\n\x1b[2J",
    "\U0010ffff",
    "x" * 5000,
    "line\n" * 40_000,
)
OTHERS: tuple[object, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    b"\xff",
    [1, 2, 3],
    {"kind": "killed"},
)
NODES, PER_NODE = 2, 2
ROOM_BYTES = codec.MAX_MESSAGE_BYTES - 1024  # the rest of a message of a Peer has some 150 bytes
RANKS = range(NODES * PER_NODE)
UPSTREAM = (
    *(cls for cls in messages.MESSAGE_BY_CODE.values() if not cls.is_order),
    messages.Heartbeat,
)


class Bugs(logging.Handler):
    """What the manager says of itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "a bug in taskd" in record.getMessage() or "begins anew" in record.getMessage():
            self.found.append(self.format(record))


class Peer:
    """Whoever connects: agent of `node_rank`."""

    def __init__(self, network: MemoryNetwork, node_rank: int, incarnation: str) -> None:
        self.node_rank, self.incarnation, self.sequence = node_rank, incarnation, 0
        self.dealer = MemoryDealer(network, "manager", f"agent-{node_rank}-{incarnation}")

    def frame(self, message: messages.Message) -> dict:
        self.sequence += 1
        envelope = codec.Envelope(
            "job", "agent", self.node_rank, None, self.incarnation, 0, self.sequence, "fuzz"
        )
        return dict(msgpack.unpackb(codec.encode(envelope, message)))

    def say(self, message: messages.Message) -> None:
        self.dealer.send(None, msgpack.packb(self.frame(message)))

    def heard(self) -> list[messages.Message]:
        return [codec.decode(data)[1] for _, data in self.dealer.receive()]

    @property
    def ranks(self) -> range:
        return range(self.node_rank * PER_NODE, (self.node_rank + 1) * PER_NODE)

    def register(self) -> None:
        workers = tuple(events.WorkerReport(rank, 0, WorkerState.RUNNING) for rank in self.ranks)
        self.say(
            messages.AgentRegistered(
                self.node_rank, self.incarnation, NODES, len(RANKS), 10**6, 0, 0, workers
            )
        )


class Job:
    """A manager, and the agents of a job that trains."""

    def __init__(self, directory: pathlib.Path, strategies: tuple[str, ...] = ()) -> None:
        self.network, self.clock = MemoryNetwork(), FakeClock()
        self.phases: set[JobPhase] = set()
        self.left_out = 0  # reports for which a message had no room
        config = ManagerConfig(
            "job", "unused", 30.0, None, LogConfig(directory), strategies=strategies
        )
        self.service = Service(config, MemoryRouter(self.network, "manager"), self.clock)
        self.agents = [Peer(self.network, node_rank, f"a{node_rank}") for node_rank in range(NODES)]
        for agent in self.agents:
            agent.register()
        self.service.turn()
        for agent in self.agents:
            for rank in agent.ranks:
                agent.say(messages.WorkerDeclared(rank, 0, entered=True))
        self.turn()

    def turn(self) -> None:
        self.service.turn()
        self.service._machine.check()
        self.phases.add(self.service._machine.phase)

    def beat(self, seconds: float, *agents: Peer) -> None:
        """Time goes by, and these agents live."""
        for _ in range(max(1, int(seconds))):
            self.clock.advance(min(1.0, seconds))
            for agent in agents:
                agent.say(messages.Heartbeat(tuple(mark(rank) for rank in agent.ranks)))
            self.turn()

    @property
    def is_unhurt(self) -> bool:
        machine = self.service._machine
        return (machine.phase, machine.generation, machine.restarts_used) == (
            JobPhase.RUNNING,
            0,
            0,
        ) and len(machine.membership.members) == len(RANKS)


def mark(rank: int) -> Mark:
    return Mark(
        rank,
        0,
        0,
        5,
        "forward",
        0.1,
        groups=(GroupMark(7, "world", 3, 3, "all_reduce"),),
        times=(("forward", 10, 2.0),),
    )


def roster_of(agent: Peer) -> Roster:
    """One of two nodes, of which this agent is one."""
    voters = (Voter(agent.node_rank, agent.incarnation, "h:1"), Voter(1, "other", "h:2"))
    return Roster(0, 5, 2, 1, voters, witness=Witness("spare", "h:3"))


def valid(dice: random.Random, agent: Peer, job: Job) -> messages.Message:
    """A message of any type, as an agent of the job might send it now."""
    cls = dice.choice(UPSTREAM)
    if cls is messages.Batch:
        return odd_batch(dice, agent, job)
    rank = dice.choice(agent.ranks)
    machine = job.service._machine
    member = machine.membership.members.get(rank)
    life = 0 if member is None else member.incarnation
    fault = Fault(
        dice.choice(list(FaultKind)),
        rank,
        life,
        "x",
        dice.choice((None, 5, 6)),
        "step",
        "x",
        "Traceback",
        -9,
    )
    report = events.WorkerReport(
        rank, life, dice.choice(list(WorkerState)), True, 5, True, True, (4,), ""
    )
    values: dict[str, object] = {
        "rank": rank, "incarnation": dice.choice((life, life, life, life + 1)),
        "node_rank": agent.node_rank, "agent_incarnation": agent.incarnation, "node_count": NODES,
        "world_size": len(RANKS), "max_restarts": 100,
        "generation": machine.generation + dice.choice((0, 0, 0, 1)), "restarts_used": 0,
        "workers": (report, *(dataclasses.replace(report,
        rank=other) for other in agent.ranks if other != rank)), "fault": fault,
        "marks": tuple(mark(rank) for rank in agent.ranks), "version": 5,
        "clean": dice.random() < 0.8, "held": ((rank, (4, 5)),), "pid": 10,
        "stage": dice.choice(("written", "failed", "published")),
        "outcome": dice.choice(("succeeded", "failed", "stopped")), "status": 1400,
        "box_versions": (5,), "snapshots": (4,), "guarded": True, "entered": True, "type": 5,
        "sequence": 1, "may_advance": dice.random() < 0.3, "term": 0,
        "roster": dice.choice((None, roster_of(agent))),
    }  # fmt: skip
    known = {field.name: field for field in dataclasses.fields(cls)}
    filled = {name: values.get(name, 0.5 if name.endswith("_s") else "text") for name in known}
    if "incarnation" in filled and "fault" in filled:
        filled["fault"] = dataclasses.replace(fault, incarnation=filled["incarnation"])
    return cls(**filled)


def odd_batch(dice: random.Random, agent: Peer, job: Job) -> messages.Batch:
    """Reports of any type, some with an odd value in their bodies.

    Those for which the message has no room are left out, and counted.
    """
    reports = []
    for _ in range(dice.choice((1, 2, 5, batch.MAX_REPORTS + 1))):
        said = valid(dice, agent, job)
        plain = schema.record(type(said)).pack(said)
        lives = [(plain.pop("rank", 0), plain.pop("incarnation", 0))]
        if isinstance(lives[0][0], int) and dice.random() < 0.5:
            lives.append((lives[0][0] + dice.choice((0, 1, -1)), dice.choice((0, 1))))
        body = msgpack.packb(mutate(dice, plain) if dice.random() < 0.2 else plain)
        ranks, incarnations = zip(*lives, strict=True)
        incarnations = incarnations[: dice.choice((1, 2))]
        reports.append(messages.Told(said.code, "fuzz", ranks, incarnations, body))
        if len(codec.body_of(messages.Batch(tuple(reports)))) > ROOM_BYTES:
            reports.pop()
            job.left_out += 1
    return messages.Batch(tuple(reports))


def mutate(dice: random.Random, thing: object) -> object:
    """Another value somewhere in it."""
    if isinstance(thing, dict) and thing:
        key = dice.choice(list(thing))
        return {**thing, key: mutate(dice, thing[key])}
    if isinstance(thing, list) and thing and dice.random() < 0.9:
        at = dice.randrange(len(thing))
        if dice.random() < 0.1:
            return [*thing, thing[at]]
        return [*thing[:at], mutate(dice, thing[at]), *thing[at + 1 :]]
    if isinstance(thing, bool) or thing is None or dice.random() < 0.1:
        return dice.choice((*NUMBERS, *TEXTS, *OTHERS))
    return dice.choice(TEXTS) if isinstance(thing, str) else dice.choice(NUMBERS)


def odd(dice: random.Random, agent: Peer, job: Job) -> bytes:
    """One message with up to three odd values in its body."""
    frame = agent.frame(valid(dice, agent, job))
    for _ in range(dice.randrange(4)):
        frame["body"] = mutate(dice, frame["body"])
    return bytes(msgpack.packb(frame))


def obey(dice: random.Random, agent: Peer, job: Job, answers: list[messages.Message]) -> None:
    """What an honest agent would say to these orders, mostly: so that recoveries get on."""
    machine = job.service._machine
    for order in answers:
        for rank in (
            agent.ranks if dice.random() < 0.8 and rank_of(order) in (None, *agent.ranks) else ()
        ):
            life = machine.membership.members[rank].incarnation
            if isinstance(order, messages.Interrupt) or (
                isinstance(order, messages.ReplaceWorker) and order.rank == rank
            ):
                agent.say(
                    messages.WorkerPaused(
                        rank,
                        life,
                        order.generation,
                        5 if isinstance(order, messages.Interrupt) else None,
                        clean=True,
                    )
                )
            elif isinstance(order, messages.Resume):
                agent.say(messages.WorkerRecovered(rank, life, order.generation, 6, 0.1, 0.1, 0.1))
            elif isinstance(order, messages.RestartGroup):
                agent.say(messages.WorkerStarted(rank, life, 10))
            elif isinstance(order, messages.Dump) and rank in order.writers:
                agent.say(messages.WorkerDumped(rank, life, order.generation, "written"))
    job.turn()


def rank_of(order: messages.Message) -> object:
    return getattr(order, "rank", None)


def by_a_stranger(dice: random.Random, count: int, directory: pathlib.Path) -> int:
    """The job must not notice. Returns how many reports were left out."""
    job = Job(directory)
    assert job.is_unhurt
    for number in range(count):
        stranger = Peer(job.network, dice.choice((0, 1, 2, 3)), f"s{number % 50}")
        stranger.dealer.send(None, odd(dice, stranger, job))
        job.turn()
        if number % 20 == 0:
            job.beat(dice.choice((0.1, 1.0, 3.0)), *job.agents)
        assert job.is_unhurt, f"after message {number}: {job.service._machine.story.last()}"
        stranger.heard()
        stranger.dealer.close()
    job.beat(60.0, *job.agents)
    assert job.is_unhurt
    for agent in job.agents:
        assert any(isinstance(said, messages.HeartbeatAck) and said.known for said in agent.heard())
    return job.left_out


def by_an_agent(dice: random.Random, count: int, directory: pathlib.Path) -> dict[str, int]:
    """The manager must go on, whatever becomes of the job.

    Returns how many jobs it took, and how much was taken in.
    """
    seen = {"jobs": 0, "taken": 0, "rejected": 0, "ended": 0, "left out": 0}
    said = 0
    phases: set[JobPhase] = set()
    while said < count:
        job = Job(directory, dice.choice(((), ("recover", "dump"), ("dump",))))
        seen["jobs"] += 1
        for _ in range(dice.choice((3, 10, 50, 200))):
            liar = dice.choice(job.agents)
            if job.service.result is not None:
                seen["ended"] += 1
                break
            liar.dealer.send(None, odd(dice, liar, job))
            said += 1
            job.turn()
            answers = liar.heard()
            rejected = sum(
                isinstance(answer, messages.Rejected | messages.Refused) for answer in answers
            )
            seen["rejected"] += rejected
            seen["taken"] += not rejected
            for agent in job.agents:
                obey(dice, agent, job, answers if agent is liar else agent.heard())
            if dice.random() < 0.2:
                job.beat(dice.choice((0.01, 0.3, 1.0, 5.0)), *job.agents)
            if any(
                isinstance(answer, messages.HeartbeatAck) and not answer.known for answer in answers
            ):
                liar.register()
        if job.service.result is None:
            job.beat(100.0)  # all of them are silent: leases, alarms and whatever was awaited
        phases |= job.phases
        seen["left out"] += job.left_out
    assert phases >= {
        JobPhase.RUNNING,
        JobPhase.PAUSING,
        JobPhase.RESUMED,
        JobPhase.SAVING,
        JobPhase.ENDING,
        JobPhase.ENDED,
    }, phases
    return seen


def main(count: int = 20_000, seed: int = 1) -> int:
    logger, bugs = logging.getLogger("taskd"), Bugs()
    logger.addHandler(bugs)
    try:
        with tempfile.TemporaryDirectory() as directory:
            left_out = by_a_stranger(random.Random(seed), count // 4, pathlib.Path(directory))
            seen = by_an_agent(random.Random(seed), count - count // 4, pathlib.Path(directory))
            seen["left out"] += left_out
    finally:
        logger.removeHandler(bugs)
    assert not bugs.found, f"seed {seed}: {len(bugs.found)} bugs, the first:\n{bugs.found[0]}"
    print(f"{count} messages, {seen}: no error, no job hurt by a stranger")
    return 0


if __name__ == "__main__":
    logging.getLogger("taskd").propagate = False
    raise SystemExit(main(*(int(text) for text in sys.argv[1:])))
