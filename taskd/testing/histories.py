"""Random histories.

Small jobs with faults at any time over any network, each made from two numbers alone. A command,
too.

    python -m taskd.testing.histories --count 300000 --jobs 2
    python -m taskd.testing.histories --seed 17 --only 4711

The first takes a fresh seed and prints it; the second plays one history again, with its story. Owns
what a history is and what must hold at its end. Whether a job is stuck is
`taskd.testing.liveness`'s to say.
"""

import argparse
import multiprocessing
import random
import secrets
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from taskd.core import commands as do
from taskd.core.story import describe
from taskd.testing.liveness import Stuck
from taskd.testing.network import NetworkQuality
from taskd.testing.script import FaultScript, Trouble
from taskd.testing.simulation import Result, SimulatedJob

_LINKS = ("cut", "partition", "slow", "stall")
_PARTS = (
    "kill", "crash", "exit", "exit early", "raise", "tear", "freeze", "fail start", *_LINKS,
)  # fmt: skip
_WITHOUT_TASKD = ("kill", "exit", *_LINKS)
_QUALITIES = (
    NetworkQuality(),
    NetworkQuality(jitter_s=0.05),
    NetworkQuality(duplicate=0.2),
    NetworkQuality(loss=0.1),
    NetworkQuality(jitter_s=0.05, loss=0.1, duplicate=0.2),
)
# What the rules end on purpose: a failure after Release, one that came back; a node that is lost;
# or one that had a fault, found no manager in time, and went on as plain torchrun does, without the
# others.
_GOOD_REASONS = (
    "returned everywhere", "came back", "times:", "in a row", "already left", "already ended well",
    "not known to this manager", "no manager answers", "has been silent", "was cut off",
    "has not come to the next manager", "cannot start anew without node",
    "was lost before it registered",
)  # fmt: skip
_AWAY_S = (0.01, 1.0, 5.0, 40.0, 100.0, 400.0)  # until another host has the place of a lost one
_UNHEARD_S = (5.0, 25.0, 33.0, 45.0, 100.0)  # nodes are lost after 30 to 33
_CHUNK = 50  # histories that a process takes at once: a few seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one history.

    `kind`: "ended", "stuck" or "failed"; `detail`: of what must not be.
    """

    number: int
    kind: str
    detail: str = ""


@dataclass(slots=True)
class Tally:
    """Of many histories. `bad`: those that did not end well."""

    seed: int
    count: int = 0
    succeeded: int = 0
    seconds: float = 0.0
    bad: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.count += 1
        self.succeeded += outcome.kind == "ended" and not outcome.detail
        if outcome.kind != "ended":
            self.bad.append(outcome)

    def __str__(self) -> str:
        stuck = sum(outcome.kind == "stuck" for outcome in self.bad)
        return (
            f"{self.count} histories of seed {self.seed}: {self.succeeded} jobs succeeded, "
            f"{self.count - self.succeeded - len(self.bad)} ended "
            f"as the rules say, {stuck} stuck, {len(self.bad) - stuck} failed; "
            f"{self.seconds:.1f} s"
        )


def replay_command(seed: int, number: int) -> str:
    """What plays exactly this history again."""
    return f"python -m taskd.testing.histories --seed {seed} --only {number}"


def make(seed: int, number: int) -> SimulatedJob:
    """The job of this history."""
    rng = random.Random(f"{seed}:{number}")  # noqa: S311
    nodes, per_node = rng.randint(1, 3), rng.randint(1, 3)
    is_declared = rng.random() < 0.85
    kinds: tuple[str, ...] = _PARTS if is_declared else _WITHOUT_TASKD
    # A manager that was restarted waits for ever for a node that it has never seen.
    kinds += (
        ("agent",)
        if rng.random() < 0.1 and nodes > 1
        else ("manager",)
        if rng.random() < 0.7
        else ()
    )
    script = FaultScript.random(
        rng, count=rng.randint(0, 5), until=0.5, ranks=nodes * per_node, nodes=nodes, kinds=kinds
    )
    arguments: dict[str, Any] = {
        "nodes": nodes,
        "ranks_per_node": per_node,
        "steps": rng.randint(8, 12),
        "seed": rng.randrange(2**32),
        "quality": rng.choice(_QUALITIES),
        "is_declared": is_declared,
        "is_sharded": is_declared and rng.random() < 0.6,
        "wait_for_exit": rng.random() < 0.3,
        "gathers": rng.random() < 0.3,
    }
    if nodes > 1 and rng.random() < 0.3:
        arguments["reschedule_s"] = 270.0
        script = _with_lost_nodes(rng, script, nodes)
        kind = rng.random()
        if kind < 0.5:  # and some go on without it, at once or when it was waited for
            arguments["strategies"] = ("recover", "elastic-training")
            arguments["reschedule_s"] = rng.choice((0.0, 30.0, 270.0))
    # For a manager that was restarted such a node is one that it has never seen.
    is_seen = not any(trouble.kind == "manager" for trouble in script)
    if is_seen and rng.random() < 0.15:
        how, node = rng.choice(("partition", "stall")), rng.randrange(nodes)
        unheard = Trouble(rng.random() * 0.5, how, node, rng.choice(_UNHEARD_S))
        script = FaultScript.of([*script, unheard])
    return SimulatedJob(script=script, **arguments)


def _with_lost_nodes(rng: random.Random, script: FaultScript, nodes: int) -> FaultScript:
    """The same with one or two nodes that are lost and replaced, perhaps too late.

    One is never lost: where nobody is left who was there before, torchruns begin a new job
    (`taskd.torchrun.places`), which counts its generations from 0 again.
    """
    kept = rng.randrange(nodes)
    others = [node for node in range(nodes) if node != kept]
    lost = [
        Trouble(rng.random() * 0.5, "agent", rng.choice(others), rng.choice(_AWAY_S))
        for _ in range(rng.randint(1, 2))
    ]
    if nodes > 2 and rng.random() < 0.4:  # the first of them had the manager
        lost[0] = replace(lost[0], kind="host")
    return FaultScript.of([*script, *lost])


def judge(job: SimulatedJob, result: Result) -> str:
    """What is said of a job that ended as the rules say ("": it succeeded).

    Raises AssertionError for any other.
    """
    outcomes = {getattr(outcome, "outcome", None) for outcome in result.outcomes.values()}
    # A manager that no goodbye has reached has nothing to end when all have left.
    have_left = None not in result.outcomes.values()
    assert result.succeeded is not None or have_left, f"did not end by {result.ended_at:.0f} s"
    assert all(map(keeps_steps, [None, *result.records], result.records)), (
        "more than one step was lost"
    )
    # a node that went on alone did so as plain torchrun: not modelled
    if (result.succeeded and not nodes_alone(result)) or outcomes == {"succeeded"}:
        steps = list(range(job.world.steps))
        per_node = len(result.states) // len(result.outcomes)
        wrong = [
            rank
            for rank, state in result.states.items()
            if state != steps and _has_stayed(job, result.outcomes[rank // per_node])
        ]
        assert not wrong, f"ranks {wrong} do not hold every step once"
        return ""
    reason = result.reason if result.succeeded is not None else ""
    assert any(words in f"{reason} {result.outcomes}" for words in _GOOD_REASONS), (
        f"ended: {reason}"
    )
    return reason or "without a manager"


def keeps_steps(before: do.RecoveryRecord | None, record: do.RecoveryRecord) -> bool:
    """Whether a recovery in place lost one step at most."""
    is_in_place = record.strategy in {"retry", "recover-in-place"}
    return counts_more(before) or not is_in_place or record.steps_redone <= 1


def counts_more(before: do.RecoveryRecord | None) -> bool:
    """Whether the record after this one counts what this recovery does again.

    So it is after a restart of all that was cut short before a rank had said from where it goes on.
    """
    return before is not None and bool(before.not_completed) and before.version is None


def nodes_alone(result: Result) -> list[int]:
    """Those that no manager answered, and that left their ranks to torchrun."""
    outcomes = result.outcomes.items()
    return [node for node, outcome in outcomes if isinstance(outcome, do.FallBack)]


def _has_stayed(job: SimulatedJob, outcome: object) -> bool:
    """Whether this node was part of the job at its end.

    One that the others went on without, and that came back too late, ends as failed.
    """
    is_elastic = "elastic-training" in job.strategies
    return outcome is not None and not (
        is_elastic and isinstance(outcome, do.FinishRun) and outcome.outcome == "failed"
    )


def play(seed: int, number: int) -> Outcome:
    """One history, from its beginning to its end."""
    job = make(seed, number)
    try:
        return Outcome(number, "ended", judge(job, job.run()))
    except Stuck as stuck:
        return Outcome(number, "stuck", str(stuck))
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(
            number, "failed", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        )


def play_many(seed: int, *, seconds: float = float("inf"), count: int = 2**62) -> Tally:
    """As many as fit into this much processor time, at most `count`."""
    began, tally = time.process_time(), Tally(seed)
    while tally.count < count and tally.seconds < seconds:
        tally.add(play(seed, tally.count))
        tally.seconds = time.process_time() - began
    return tally


def _play_chunk(chunk: tuple[int, int, int]) -> list[Outcome]:
    seed, first, end = chunk
    return [play(seed, number) for number in range(first, end)]


def _play_all(tally: Tally, first: int, count: int, jobs: int) -> None:
    began = time.monotonic()
    chunks = [
        (tally.seed, at, min(at + _CHUNK, first + count))
        for at in range(first, first + count, _CHUNK)
    ]
    with multiprocessing.Pool(jobs) as pool:
        for outcomes in pool.imap(_play_chunk, chunks):
            for outcome in outcomes:
                tally.add(outcome)
                if outcome.kind != "ended":
                    print(  # noqa: T201
                        f"{outcome.kind}: {outcome.detail[:400]}\n    "
                        f"{replay_command(tally.seed, outcome.number)}",
                        flush=True,
                    )
    tally.seconds = time.monotonic() - began


def _tell(seed: int, number: int) -> bool:
    """One history with its script, the manager's story and how it ended. True: well."""
    job = make(seed, number)
    outcome = play(seed, number)
    print(*job.script, sep="\n")  # noqa: T201
    try:
        job.run()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    for story in job.stories:
        print("manager:", *(describe(entry)[:240] for entry in story), sep="\n  ")  # noqa: T201
    for agent in job.agents:
        print(  # noqa: T201
            f"node {agent.node_rank}:",
            *(describe(entry)[:240] for entry in agent.machine.story),
            sep="\n  ",
        )
    print(f"{outcome.kind}: {outcome.detail}")  # noqa: T201
    return outcome.kind == "ended"


def main(arguments: list[str] | None = None) -> int:
    """The command. 0: every history ended as the rules say."""
    parser = argparse.ArgumentParser(
        prog="python -m taskd.testing.histories",
        description="Random histories of small jobs with faults.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="which histories; a fresh one is taken and printed if none is given",
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="this one alone, with its whole story")
    wanted = parser.parse_args(arguments)
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    if wanted.only is not None:
        return 0 if _tell(seed, wanted.only) else 1
    print(f"seed {seed}", flush=True)  # noqa: T201
    tally = Tally(seed)
    _play_all(tally, wanted.first, wanted.count, wanted.jobs)
    print(tally)  # noqa: T201
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
