"""One history of a large job: thousands of nodes, faults that come close together. A command.

    python -m taskd.testing.large --nodes 8192 --per-node 8 --faults 20
    python -m taskd.testing.large --nodes 8192 --per-node 8 --faults 20 --seed 17

The first takes a fresh seed and prints it; the second plays one history again. Owns what such a
history is, what must hold at its end, and what is told of it.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import secrets
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.testing.histories import counts_more, nodes_alone
from taskd.testing.network import NetworkQuality
from taskd.testing.script import FaultScript
from taskd.testing.simulation import SimulatedJob

if TYPE_CHECKING:
    from taskd.testing.simulation import Result

# What the rules end on purpose: an exception that comes back, and a fault when the steps are done.
_ENDINGS = ("came back", "returned everywhere", "already ended well", "already left")
# Nearly everything lives to the end: looking for garbage in cycles took half of the time.
_FEW_COLLECTIONS = (200_000, 20, 50)
# An answer then takes 2 s: as long as a fault waits for a manager that was never there.
_SLOW_S = 1.0
_FIRST_AT_S = 0.13  # all ranks train by then, and none has come to its end
# Losses and repetitions are few, as each of them is met by some of thousands of nodes.
_QUALITIES = (
    NetworkQuality(),
    NetworkQuality(jitter_s=0.02),
    NetworkQuality(jitter_s=0.02, loss=0.001, duplicate=0.001),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a history."""

    nodes: int = 8192
    per_node: int = 8
    faults: int = 0
    steps: int = 4


def replay_command(seed: int, size: Size) -> str:
    """What plays exactly this history again."""
    return (
        f"python -m taskd.testing.large --nodes {size.nodes} --per-node {size.per_node} "
        f"--faults {size.faults} --steps {size.steps} --seed {seed}"
    )


def make(seed: int, size: Size) -> SimulatedJob:
    """The job of this history. Invariants are asserted as in any large job."""
    rng = random.Random(f"{seed}:{size}")  # noqa: S311
    ranks = size.nodes * size.per_node
    script = FaultScript.cascade(
        rng, count=size.faults, after=_FIRST_AT_S, ranks=ranks, nodes=size.nodes
    )
    return SimulatedJob(
        nodes=size.nodes,
        ranks_per_node=size.per_node,
        steps=size.steps,
        script=script,
        seed=rng.randrange(2**32),
        quality=rng.choice(_QUALITIES),
        is_sharded=rng.random() < 0.5,
        checks_all=False,
        gathers=True,
    )


def judge(job: SimulatedJob, result: Result) -> None:
    """Raises AssertionError unless every rank holds every step once, and none was done again.

    No fault of such a history takes the last copy of the state, nor a node for good. But a rule may
    end the job, and a node whose messages take too long may leave it to torchrun.
    """
    alone = nodes_alone(result)
    quick = [node for node in alone if not job.network.is_slow(job.agents[node].address, _SLOW_S)]
    assert not quick, f"nodes {quick} went on alone"
    if not result.succeeded:
        assert any(words in result.reason for words in _ENDINGS), f"ended: {result.reason}"
    elif not alone:  # else as plain torchrun: not modelled
        steps = list(range(job.world.steps))
        wrong = [rank for rank, state in result.states.items() if state != steps]
        assert not wrong, f"{len(wrong)} ranks do not hold every step once: {wrong[:16]}"
    lost = sum(
        record.steps_redone
        for before, record in zip([None, *result.records], result.records, strict=False)
        if record.strategy != "restart" and not counts_more(before)
    )
    assert not lost, f"{lost} steps were lost"


def describe(job: SimulatedJob, result: Result, seconds: float) -> str:
    """How it ended, and what that took."""
    checks = job.checks
    kinds = Counter(record.strategy for record in result.records)
    lost = sum(record.steps_redone for record in result.records)
    recoveries = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = [
        f"ended after {result.ended_at:.3f} s of its time: {result.reason}",
        f"recoveries: {recoveries}; {lost} steps lost",
        f"the manager handled {checks.events} events, {checks.events / seconds:.0f} per second",
        f"checks: {checks.whole} of all members, {checks.partial} of those that the event names",
        f"{seconds:.1f} s of processor time, {peak_bytes / 1e9:.2f} GB",
    ]
    return "\n".join(lines)


def play(seed: int, size: Size) -> str:
    """One history, from its beginning to its end. Raises AssertionError for a bad one."""
    began = time.process_time()
    job = make(seed, size)
    result = job.run()
    judge(job, result)
    return describe(job, result, time.process_time() - began)


def main(arguments: list[str] | None = None) -> int:
    """The command. 0: no invariant was broken, nobody was stuck, no step was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m taskd.testing.large",
        description="One random history of a large job with faults that come close together.",
    )
    usual = Size()
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--per-node", type=int, default=usual.per_node, help="ranks of a node")
    parser.add_argument("--faults", type=int, default=usual.faults, help="places that are hurt")
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument(
        "--seed", type=int, help="which history; a fresh one is taken if none is given"
    )
    wanted = parser.parse_args(arguments)
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    size = Size(wanted.nodes, wanted.per_node, wanted.faults, wanted.steps)
    print(f"seed {seed}", flush=True)  # noqa: T201
    try:
        print(play(seed, size))  # noqa: T201
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        print(f"play it again: {replay_command(seed, size)}")  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    gc.set_threshold(*_FEW_COLLECTIONS)
    sys.exit(main())
