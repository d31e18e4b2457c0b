"""SIGKILL at random moments of a job that saves its state in every way.

It must go on from the newest that was complete, to the last bit.

    python benchmarks/kill_everything.py [--kills 100] [--seed 1] [--directory DIR] [--json FILE]
    python benchmarks/kill_everything.py --seed 1 --episode 7

The second plays the kills of one episode again (their moments are as random as machines are).

4 ranks, gloo, FSDP over all or HSDP 2 x 2, torchrun, manager; snapshots in node memory, and a
periodic checkpoint every few steps of a state so large that one is being written most of the time.
An episode is one job in one directory. In every other one a fault leads to a dump, and the kill
comes while it is written.

writer, two writers   the job must replace them and go on from memory: nothing from disk, at most
                      `--snapshot-every` steps redone
manager               nobody may be interrupted; a new manager must know the job
manager, then writer  before there is a new manager: all processes are started anew, from what is
                      on the disk
everything            manager, torchrun, forkserver and ranks, in any order; also during a start.
                      Then the same command again: restore() must give the newest version that is
                      whole on the disk, which is read in full after the kill, and must not be older
                      than what had been published before it
... in a dump         one of these while an emergency checkpoint is written. Whatever the job does,
                      it must end or go on; the rest as for `everything`

Each commit and each restore carries a SHA-256 of all that the rank holds; all of them, of all
lives, must be those of a run without kills. A directory of an episode that failed is kept. Exit
status 1 if one failed, or if no kill hit a save in progress.
"""

from __future__ import annotations

import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from typing import TYPE_CHECKING

from benchmarks.hunted_job import Digests, Hunted, is_dump, undisturbed
from benchmarks.measuring import RANKS, conditions, load_1min, parser, save

if TYPE_CHECKING:
    import argparse

KINDS = ("writer", "two writers", "manager", "everything")
WEIGHTS = (3, 3, 2, 4)
THEN_WRITER_SHARE = 0.5  # of the kills of the manager
EARLY_SHARE = 0.2  # of the kills of everything: those during a start
START_S = 4.0  # a start with a restore takes about as long
GAP_S = 0.4  # between two writers: both in one recovery, or the second in the recovery of the first
DUMP_S = 0.35  # a dump takes about as long
LAYOUTS = ("hsdp", "fsdp")


class Score:
    """What was killed and what came of it."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()  # of those, with a save in progress
        self.strategies: Counter[str] = Counter()
        self.restarts = self.fresh = 0
        self.failures: list[dict] = []

    def restarted(self, version: int) -> None:
        """One start was checked against the disk, and began with this version."""
        self.restarts += 1
        self.fresh += version == 0

    def show(self) -> None:
        """As a table."""
        print(f"{'':26}{'kills':>7}{'in a save':>11}{'failures':>10}")
        for kind in sorted(+self.kills):
            failed = sum(failure["kind"] == kind for failure in self.failures)
            print(f"{kind:26}{self.kills[kind]:>7}{self.hits[kind]:>11}{failed:>10}")
        print(
            f"starts checked against the disk: {self.restarts}, of which nothing whole was "
            f"there: {self.fresh}; recoveries: {dict(self.strategies)}"
        )
        for failure in self.failures:
            print(f"FAILED: {failure}")

    def result(self) -> dict:
        """As JSON."""
        return {
            "kills": dict(+self.kills),
            "in_a_save": dict(+self.hits),
            "starts_checked": self.restarts,
            "of_which_fresh": self.fresh,
            "recoveries": dict(self.strategies),
            "failures": self.failures,
        }


class Episode:
    """The kills of one job."""

    def __init__(
        self,
        number: int,
        directory: pathlib.Path,
        options: argparse.Namespace,
        known: dict[str, tuple[Digests, float]],
        score: Score,
    ) -> None:
        self.chance = random.Random(f"{options.seed}-{number}")
        self.layout = LAYOUTS[number // 2 % len(LAYOUTS)]
        self.is_dump = number % 2 == 1
        digests, step_s = known[self.layout]
        self.hunted = Hunted(
            directory, options, self.layout, digests, "dump" if self.is_dump else ""
        )
        self.window_s = 2 * options.checkpoint_every * step_s
        self.score, self.kind = score, "start"

    def play(self, kills: int) -> None:
        """At most so many kills; fewer if the job comes to its end before."""
        hunted = self.hunted
        hunted.start()
        for _ in range(kills):
            self.kind = self.chance.choices(KINDS, WEIGHTS)[0]
            if hunted.is_almost_done():
                break
            is_early = (
                not self.is_dump
                and self.kind == "everything"
                and self.chance.random() < EARLY_SHARE
            )
            if is_early:
                # not counted: only the start that follows is wanted
                hunted.kill_everything(self.chance)
                hunted.start()
                time.sleep(self.chance.uniform(0, START_S))
            else:
                hunted.wait_until_settled()
                time.sleep(self.chance.uniform(0, self.window_s))
                if hunted.is_almost_done():
                    break
            self.in_a_dump() if self.is_dump else self.strike()
        else:
            hunted.wait_until_settled()
        hunted.finish()

    def strike(self) -> None:
        """One kill, and the check of what comes of it."""
        hunted, ranks = (
            self.hunted,
            self.chance.sample(range(RANKS), 2 if self.kind == "two writers" else 1),
        )
        high, since, published = (
            max(hunted.newest(rank) for rank in range(RANKS)),
            time.monotonic(),
            hunted.published(),
        )
        self.hit(ranks)
        if self.kind == "everything":
            self.score.restarted(hunted.check_restart(published))
        elif self.kind == "manager":
            hunted.check_went_on(high, since)
            if self.chance.random() < THEN_WRITER_SHARE:
                self.kind = "manager, then writer"
                high, since, published = (
                    max(hunted.newest(rank) for rank in range(RANKS)),
                    time.monotonic(),
                    hunted.published(),
                )
                self.hit(ranks)
                hunted.check_restarted(high, since, published)
                published = hunted.published()
                # it goes on without recovery: this life is over
                hunted.kill_everything(self.chance)
                self.score.restarted(hunted.check_restart(published))
            else:
                hunted.new_manager()
        else:
            hunted.check_survived(high, since, set(ranks))

    def saving(self) -> set[str]:
        """What is being written: in an episode of dumps, only those."""
        return {
            name for name in self.hunted.saves_in_progress() if is_dump(name) or not self.is_dump
        }

    def hit(self, ranks: list[int]) -> None:
        """Count it, and whether a save was being written before it and still was behind it."""
        hunted = self.hunted
        self.score.kills[self.kind] += 1
        saving = self.saving()
        if self.kind.startswith("everything"):
            hunted.kill_everything(self.chance)
            saving = self.saving()  # nobody is left who could have removed it
        elif self.kind in ("manager", "manager in a dump"):
            hunted.kill([hunted.manager.process.pid])
        else:
            pids = hunted.pids_of(ranks)
            if len(pids) > 1 and self.chance.random() < 0.5:
                hunted.kill(pids[:1])
                time.sleep(self.chance.uniform(0, GAP_S))
                pids = pids[1:]
            hunted.kill(pids)
        self.score.hits[self.kind] += bool(saving & self.saving())

    def in_a_dump(self) -> None:
        """A rank dies; while the others write the dump, the kill comes."""
        hunted = self.hunted
        order = self.chance.sample(range(RANKS), RANKS)
        since = time.monotonic()
        high = max(hunted.newest(rank) for rank in range(RANKS))
        hunted.kill(hunted.pids_of(order[:1]))
        self.kind += " in a dump"
        if not hunted.wait_until("a dump", lambda: bool(self.saving()), may_end=True):
            raise AssertionError(f"no dump was begun:\n{hunted.agent.text[-3000:]}")
        time.sleep(self.chance.uniform(0, DUMP_S))
        published = hunted.published()
        if not hunted.has_ended():
            try:
                self.hit(order[1:3] if self.kind.startswith("two") else order[1:2])
            except ProcessLookupError:  # it had ended by itself, a moment before
                self.score.kills[self.kind] -= 1
        # without its manager a job goes on as plain torchrun does
        if hunted.wait_for_progress(high, since, may_end=True):
            hunted.check_restarted(high, since, published)
            hunted.kill_everything(self.chance)
        self.check_end()
        self.score.restarted(hunted.check_restart(published))

    def check_end(self) -> None:
        """All of it has ended, and what it said last is true."""
        hunted = self.hunted
        hunted.manager.wait(60)
        hunted.wait_until(
            "the end of all processes", lambda: not hunted.job.leftovers(), may_end=True
        )
        last = hunted.agent.text.rstrip().rpartition("\n")[2]
        if " was saved in " in last:
            path = pathlib.Path(last.rpartition(" was saved in ")[2])
            assert path.is_dir(), f"{last}: and there is nothing"


def play(
    number: int,
    kills: int,
    base: pathlib.Path,
    options: argparse.Namespace,
    known: dict,
    score: Score,
) -> None:
    """One episode; its directory is kept if it fails."""
    directory = base / f"episode-{number}"
    episode = Episode(number, directory, options, known, score)
    began, before, problem = time.monotonic(), score.kills.total(), ""
    try:
        episode.play(kills)
    except (AssertionError, TimeoutError, ValueError, KeyError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
        score.failures.append(
            {
                "seed": options.seed,
                "episode": number,
                "layout": episode.layout,
                "kind": episode.kind,
                "directory": str(directory),
                "problem": problem,
            }
        )
    finally:
        episode.hunted.close()
    score.strategies.update(episode.hunted.strategies)
    print(
        f"episode {number}, {episode.layout}{', dump' if episode.is_dump else ''}: "
        f"{score.kills.total() - before} kills in "
        f"{time.monotonic() - began:.0f} "
        f"s{': FAILED ' + problem[:300] if problem else ''}",
        flush=True,
    )
    if not problem:
        shutil.rmtree(directory)


def main() -> None:
    """Kill, check, print."""
    options_of = parser(__doc__)
    options_of.add_argument("--kills", type=int, default=100)
    options_of.add_argument(
        "--steps", type=int, default=60, help="of a job; an episode ends with it"
    )
    options_of.add_argument("--checkpoint-every", type=int, default=2)
    options_of.add_argument("--snapshot-every", type=int, default=3)
    options_of.add_argument("--hidden", type=int, default=1024)
    options_of.add_argument("--layers", type=int, default=7)
    options_of.add_argument("--seed", type=int, default=1)
    options_of.add_argument("--episode", type=int, help="this one only")
    options_of.add_argument(
        "--directory",
        type=pathlib.Path,
        help="where checkpoints are written; default: that for temporary files",
    )
    options = options_of.parse_args()
    base = pathlib.Path(tempfile.mkdtemp(prefix="taskd-kill-", dir=options.directory))
    result: dict = {"conditions": conditions()}
    began = time.monotonic()
    known = {
        layout: undisturbed(base / f"undisturbed-{layout}", options, layout) for layout in LAYOUTS
    }
    for layout, (_, step_s) in known.items():
        print(f"undisturbed: {layout} {1e3 * step_s:.0f} ms a step", flush=True)
        shutil.rmtree(base / f"undisturbed-{layout}")
    score, number = Score(), options.episode or 0
    while score.kills.total() < options.kills and (
        options.episode is None or number == options.episode
    ):
        play(number, options.kills - score.kills.total(), base, options, known, score)
        number += 1
    if not score.failures:
        base.rmdir()
    state = 12e-6 * options.layers * (options.hidden + 1) * options.hidden
    result["conditions"] |= {
        "load_1min_after": load_1min(),
        "seconds": round(time.monotonic() - began),
        "state_mb": round(state),
        "mb_per_rank": {"hsdp": round(state / 2), "fsdp": round(state / RANKS)},
        "step_ms": {layout: round(1e3 * step_s) for layout, (_, step_s) in known.items()},
    }
    result |= score.result()
    score.show()
    print(f"conditions: {result['conditions']}")
    save(result, options.json)
    assert score.hits.total() > 0, "no kill hit a save in progress: let the state be larger"
    if score.failures:
        raise SystemExit(f"{len(score.failures)} failures; their directories are in {base}")


if __name__ == "__main__":
    main()
