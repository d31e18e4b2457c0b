"""Kills writers of checkpoints at seeded moments, and looks at what is left.

Crash.py FOLDER SEED ROUNDS. Prints one JSON object.

In each round 1 or 3 processes save one version after another, and publish, and delete old ones,
until one, two or all of them are killed with SIGKILL: by themselves just before their n-th
operation on a name in the file system, or by us at a random time, in the middle of whatever they
do. The others are killed then. Afterwards the newest checkpoint must be the last one whose
publication had returned, or the one that was just being published, whole to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoints import assert_holds, state_of

from taskd.checkpoint import folder
from taskd.checkpoint.names import parse_hidden
from taskd.checkpoint.saver import Saver

ROWS = 20_000  # 1.4 MB: long enough in the writing to be hit there
KEEP = 2
# the last: renameat2
OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "ctypes.dlsym",
}


def die_before_operation(number: int) -> None:
    left = number

    def hook(event: str, _arguments: tuple) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def train(
    directory: Path, rank: int, writers: tuple[int, ...], attempt: str, version: int, pipe: int
) -> None:
    saver = Saver(
        directory,
        job="job",
        rank=rank,
        writers=writers,
        attempt=attempt,
        generation=0,
        world_size=len(writers),
        every=1,
        keep=KEEP,
    )
    while True:
        os.write(pipe, f"begun {version}\n".encode())
        saver.save(
            version, state_of(version, ROWS), {f"ranks/{rank}/random": bytes([rank, version % 256])}
        )
        saver.wait()
        assert not saver.problem, saver.problem
        if rank == writers[0]:
            assert saver.published is not None
            os.write(pipe, f"published {version}\n".encode())
        version += 1


def round_of(
    directory: Path, number: int, chance: random.Random, version: int
) -> tuple[list[str], list[int]]:
    """What the processes said, and the signals that ended them."""
    writers = (0,) if number % 2 else (0, 1, 2)
    victims = set(chance.sample(writers, chance.randint(1, len(writers))))
    is_counted = chance.random() < 0.5
    operation, delay_s = chance.randint(1, 220), chance.uniform(0, 0.25)
    reader, writer = os.pipe()
    children = {}
    for rank in writers:
        pid = os.fork()
        if pid == 0:
            try:
                if is_counted and rank in victims:
                    die_before_operation(operation)
                train(directory, rank, writers, f"round{number}", version, writer)
            finally:
                os._exit(1)
        children[rank] = pid
    os.close(writer)
    with os.fdopen(reader) as said:
        first = said.readline()
        if not is_counted:
            time.sleep(delay_s)  # the moment itself is what is random
            for rank in sorted(victims):
                os.kill(children[rank], signal.SIGKILL)
        # A victim of the counting kind ends by itself. Its fellows wait for it, so they are killed
        # next.
        ended = (
            {rank: os.waitpid(children[rank], 0)[1] for rank in sorted(victims)}
            if not is_counted
            else first_to_end(children, victims)
        )
        for rank in writers:
            if rank not in ended:
                os.kill(children[rank], signal.SIGKILL)
                ended[rank] = os.waitpid(children[rank], 0)[1]
        lines = [first, *said]
    return [line.strip() for line in lines if line.endswith("\n")], [
        -os.waitstatus_to_exitcode(status) for status in ended.values()
    ]


def first_to_end(children: dict[int, int], victims: set[int]) -> dict[int, int]:
    ranks = {pid: rank for rank, pid in children.items() if rank in victims}
    pid, status = os.wait()
    assert pid in ranks, "a process ended that was no victim"
    return {ranks[pid]: status}


def main(directory: Path, seed: int, rounds: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    newest, left_drafts, left_removals, in_flight = 0, 0, 0, 0
    for number in range(rounds):
        lines, signals = round_of(directory, number, chance, newest + 1)
        assert set(signals) == {signal.SIGKILL}, (number, signals)
        told = [(word, int(version)) for word, version in (line.split() for line in lines)]
        completed = max([newest, *(version for word, version in told if word == "published")])
        begun = max(version for word, version in told if word == "begun")
        if directory.exists():
            hidden = [parse_hidden(name) for name in os.listdir(directory)]
            left_drafts += any(one is not None and one.is_partial for one in hidden)
            left_removals += any(one is not None and not one.is_partial for one in hidden)
        found = folder.scan(directory, "job", is_full=True)
        torn = [reason for path, reason in found.passed_over if not path.name.startswith(".")]
        assert not torn, (number, torn)
        version = found.valid[0].manifest.version if found.valid else 0
        assert completed <= version <= begun or version == newest == completed, (
            number,
            completed,
            version,
            begun,
        )
        for one in found.valid:
            assert_holds(one.path, one.manifest.version, one.manifest.writers, ROWS)
        in_flight += version > completed
        newest = version
    print(
        json.dumps(
            {
                "rounds": rounds,
                "newest": newest,
                "left_drafts": left_drafts,
                "left_removals": left_removals,
                "in_flight": in_flight,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
