"""Recovery time of unmodified scripts that import for long, against plain torchrun.

    pip install transformers accelerate lightning
    python benchmarks/preload.py [--pairs 5] [--trainer hf] [--json FILE]

4 ranks on gloo, trainers with checkpoints of their own. Rank 2 is killed with SIGKILL: under TaskD,
without a setting, as soon as the imports are preloaded; under torchrun (c10d, in the way that works
best for it: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) at the same step. Reported: seconds from the kill
to the first step of the slowest rank's new process, and where they were spent by the killed rank's:

    start    the kill is noticed, the others end, new processes run the script
    import   the script's imports
    group    up to the trainer's own set-up: process group, arguments
    build    model and trainer
    step     to the end of the first step, the checkpoint's load included
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import conditions, load_1min, parser, save, spread
from testbed.facts import facts_in
from testbed.job import Job
from testbed.processes import Output, environment, free_port, torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS, VICTIM = 4, 2
TRAINERS = ("hf", "lightning_ddp")
LIMIT_S = 300.0
MILESTONES = ("begin", "imported", "group", "train", "step")
PHASES = ("start", "import", "group", "build", "step")


def script_of(trainer: str) -> str:
    """Its file."""
    return str(ROOT / "benchmarks" / "trainers" / f"{trainer}.py")


@contextlib.contextmanager
def under_taskd(directory: pathlib.Path, trainer: str) -> Iterator[tuple[Output, pathlib.Path]]:
    """The job while it runs, and its facts."""
    job = Job(directory, **settings(directory))
    try:
        job.start_manager()
        yield job.start_agent(script_of(trainer), nproc=RANKS, warm=False), job.facts_dir
    finally:
        job.close()


@contextlib.contextmanager
def under_torchrun(directory: pathlib.Path, trainer: str) -> Iterator[tuple[Output, pathlib.Path]]:
    """The same in the way in which it restarts."""
    facts = directory / "facts"
    facts.mkdir(parents=True)
    env = environment(
        FACTS=str(facts), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **settings(directory)
    )
    options = (
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
    )
    command = torchrun(script_of(trainer), *options, nproc=RANKS, module="torch.distributed.run")
    process = Output(command, env, directory / "torchrun.out", directory)
    try:
        yield process, facts
    finally:
        for fact in facts_in(facts):
            with contextlib.suppress(ProcessLookupError):
                os.kill(fact["pid"], signal.SIGKILL)
        process.end()


def settings(directory: pathlib.Path) -> dict[str, str]:
    """Variables of the workload: more steps than are waited for."""
    return {"CHECKPOINTS": str(directory / "checkpoints"), "STEPS": "100000"}


def wait_until(process: Output, is_true: Callable[[], bool], what: str) -> None:
    """Raises SystemExit: it has ended, or it takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        if process.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"never seen: {what}\n{process.text[-4000:]}")
        time.sleep(0.1)


def steps_of(facts: pathlib.Path) -> int:
    """The slowest rank's newest step."""
    newest = dict.fromkeys(range(RANKS), 0)
    for fact in facts_in(facts):
        if fact["what"] == "step":
            newest[fact["rank"]] = fact["step"]
    return min(newest.values())


def recover(process: Output, facts: pathlib.Path) -> dict[str, float]:
    """Kill the victim; seconds until the slowest rank has made a step, and of each phase."""
    (old,) = {fact["pid"] for fact in facts_in(facts) if fact["rank"] == VICTIM}
    former = {fact["pid"] for fact in facts_in(facts)}
    killed_at = time.monotonic()
    os.kill(old, signal.SIGKILL)

    def first(what: str) -> dict[int, float]:
        """When each rank's new process first noted it."""
        times: dict[int, float] = {}
        for fact in facts_in(facts):
            if fact["what"] == what and fact["pid"] not in former:
                times.setdefault(fact["rank"], fact["time"])
        return times

    wait_until(process, lambda: len(first("step")) == RANKS, "a new step of every rank")
    moments = [killed_at, *(first(what)[VICTIM] for what in MILESTONES)]
    spent = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return {"total": max(first("step").values()) - killed_at} | dict(
        zip(PHASES, spent, strict=True)
    )


def measure(trainer: str, pairs: int, base: pathlib.Path) -> dict:
    """Pairs of one recovery each."""
    times: dict[str, list[dict[str, float]]] = {"taskd": [], "torchrun": []}
    ready, said = [], ""
    for number in range(pairs):
        began = time.monotonic()
        with under_taskd(base / f"{trainer}-taskd{number}", trainer) as (process, facts):
            wait_until(process, lambda: steps_of(facts) > 0, "a first step")
            stepped = time.monotonic()
            wait_until(process, lambda: "are preloaded" in process.text, "the preloaded modules")
            ready.append(time.monotonic() - stepped)
            wait_until(process, lambda: steps_of(facts) > 30, "a checkpoint")
            times["taskd"].append(recover(process, facts))
            said = next(line for line in process.text.splitlines() if "are preloaded" in line)
        with under_torchrun(base / f"{trainer}-torchrun{number}", trainer) as (process, facts):
            wait_until(process, lambda: steps_of(facts) > 30, "a checkpoint")
            times["torchrun"].append(recover(process, facts))
        print(
            f"{trainer} {number}: TaskD {times['taskd'][-1]['total']:.2f} s, torchrun "
            f"{times['torchrun'][-1]['total']:.2f} s ({time.monotonic() - began:.0f} s in all)",
            file=sys.stderr,
        )
    return {
        "trainer": trainer,
        "ready_s": [round(value, 1) for value in ready],
        "log_line": said.partition("agent-0 ")[2].replace(f"{ROOT}/", ""),
        **{
            name: {
                "n": len(found),
                **spread([one["total"] for one in found]),
                "phases_p50_s": {
                    phase: round(statistics.median(one[phase] for one in found), 3)
                    for phase in PHASES
                },
            }
            for name, found in times.items()
        },
    }


def main() -> None:
    """See the module."""
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--trainer", choices=TRAINERS, action="append")
    given = options.parse_args()
    before = conditions()
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as base:
        rows = []
        for trainer in given.trainer or TRAINERS:
            rows.append(measure(trainer, given.pairs, pathlib.Path(base)))
            save({**before, "load_1min_after": load_1min(), "trainers": rows}, given.json)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
