"""SIGTERM to every process of a job at the same instant, at random moments.

    python benchmarks/sigterm.py [--count 30] [--seed 1] [--json FILE]

4 ranks, gloo; in turns DDP and HSDP 2 x 2; manager, torchrun, forkserver and ranks are all
signalled, as scancel or a hook of a pod does it. Each time the job must leave one whole checkpoint
(all of it is read), of the last step that any rank has begun or an earlier one that every rank has
committed, end with status 2 and leave no process. Then the same command line goes on from it, and
its final digests must be those of a run that nobody has signalled. Exit status 1 if not.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import RANKS, conditions, load_1min, parser, save, spread
from taskd.checkpoint import folder
from testbed.job import Job, job

STEPS = 60
STEP_S = "0.05"  # of sleep, so that a moment may be anywhere in a step, or between two
SCRIPTS = {"ddp": "train.py", "hsdp": "sharded.py"}
ENV = {
    "STEPS": str(STEPS),
    "SLEEP_S": STEP_S,
    "STEP_S": STEP_S,
    "LAYOUT": "hsdp",
    "BATCH_NORM": "1",
    "TASKD_RECOVER_STRATEGY": "recover-in-place,dump",
}


def newest(running: Job, how: type) -> int:
    """What all ranks have committed (`how` min), or any of them (max)."""
    done = dict.fromkeys(range(RANKS), 0)
    done |= {fact["rank"]: fact["step"] for fact in running.facts("committed")}
    return how(done.values())


def start(running: Job, script: str):
    """A manager and a torchrun."""
    running.start_manager()
    return running.start_agent(script)


def undisturbed(script: str, directory: pathlib.Path) -> dict[int, str]:
    """The digests that every run must come to."""
    with job(directory, **ENV) as running:
        assert start(running, script).wait(300).returncode == 0, running.story()
        return running.digests()


def episode(
    layout: str, directory: pathlib.Path, wait_s: float, expected: dict[int, str]
) -> tuple[int, float]:
    """One signal. Returns the version that was saved, and the seconds until torchrun was gone."""
    with job(directory, **ENV) as running:
        agent = start(running, SCRIPTS[layout])
        while newest(running, min) < 1:
            assert agent.process.poll() is None, running.story()
            time.sleep(0.01)
        time.sleep(wait_s)
        before = newest(running, min)
        assert before < STEPS, "it was over before the signal: wait for less"
        pids = running.leftovers()
        assert len(pids) >= RANKS + 3, "ranks, torchrun, forkserver, manager"
        began = time.monotonic()
        for pid in pids:
            # gone only if this process did not run for so long that the job was over meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        ended = agent.wait(120)
        took_s = time.monotonic() - began
        assert ended.returncode == 2, running.story()
        assert running.manager is not None
        assert running.manager.wait(30).returncode == 1
        assert running.leftovers() == set()
        found = folder.scan(directory / "taskd_checkpoints", "test-job", is_full=True)
        (checkpoint,) = found.valid
        assert not found.passed_over
        version = checkpoint.manifest.version
        assert before <= version <= newest(running, max) + 1, (before, version)
        assert start(running, SCRIPTS[layout]).wait(300).returncode == 0, running.story()
        assert running.manager.wait(30).returncode == 0
        sources = {fact["step"] for fact in running.facts("restored")[-RANKS:]}
        assert sources == {version}, sources
        assert running.digests() == expected, "it has gone on with something else"
        return version, took_s


def main() -> int:
    """The measurement."""
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=30)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    chance = random.Random(given.seed)
    began, at_start = time.monotonic(), conditions()
    base = pathlib.Path(tempfile.mkdtemp(prefix="taskd-sigterm-"))
    expected = {layout: undisturbed(script, base / layout) for layout, script in SCRIPTS.items()}
    ends: dict[str, list[float]] = {layout: [] for layout in SCRIPTS}
    versions, failures = [], []
    for number in range(given.count):
        layout = list(SCRIPTS)[number % len(SCRIPTS)]
        directory = base / f"{number}-{layout}"
        try:
            version, took_s = episode(
                layout, directory, chance.uniform(0, STEPS * float(STEP_S)), expected[layout]
            )
        except (AssertionError, TimeoutError, ValueError) as error:
            failures.append(f"{directory}: {error}")
            print(f"FAILED: {failures[-1]}", flush=True)
            continue
        versions.append(version)
        ends[layout].append(took_s)
        print(f"{number} {layout}: step {version} saved, ended after {took_s:.2f} s", flush=True)
        shutil.rmtree(directory)
    result = {
        "conditions": {
            **at_start,
            "load_1min_after": load_1min(),
            "seconds": round(time.monotonic() - began),
        },
        "signals": given.count,
        "saved_whole_and_resumed_to_the_last_bit": len(versions),
        "versions": versions,
        "signal_to_end": {layout: spread(times) for layout, times in ends.items() if times},
        "failures": failures,
    }
    save(result, given.json)
    print(result)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
