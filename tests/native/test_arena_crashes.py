"""A writer killed at any moment leaves the newest complete snapshot, to the last bit.

Real processes, SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys

import pytest

from taskd.native.arena import Arena
from tests.native.arenas import SHARD_BYTES, patterned
from tests.native.programs import DEADLINE_S, ROOT, environment

pytestmark = pytest.mark.slow


# argv: arena, pipe. Makes snapshots for ever; a letter in the pipe for each thing that it begins or
# has done.
WRITER = """
import os, sys
from taskd.native.arena import Arena
from tests.native.arenas import patterned, put
arena, pipe = Arena.attach(int(sys.argv[1])), int(sys.argv[2])
version = max((held.version for held in arena.versions()), default=0)
while True:
    version += 1
    os.write(pipe, b"b%d\\n" % version)
    writer = arena.begin(version, 0)
    for name, data in patterned(version).items():
        writer.add(name, "uint8", (len(data),), len(data))
        os.write(pipe, b"t%d\\n" % version)
        put(writer, data)
    os.write(pipe, b"i%d\\n" % version)
    writer.complete()
    os.write(pipe, b"c%d\\n" % version)
"""


def read_lines(pipe: int, count: int) -> list[bytes]:
    """So many facts of the writer, or all until its end if `count` is 0.

    Byte by byte, so that nothing is taken too early.
    """
    lines, line = [], b""
    while count == 0 or len(lines) < count:
        assert select.select([pipe], [], [], DEADLINE_S)[0], "the writer says nothing"
        byte = os.read(pipe, 1)
        if not byte:
            assert count == 0
            break
        line += byte
        if byte == b"\n":
            lines.append(line[:-1])
            line = b""
    return lines


@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.extended("[30]"))])
def test_after_many_kills_the_newest_complete_snapshot_is_there_each_time(kills):
    chance = random.Random(20240612)
    interrupted, completed = 0, 0
    with contextlib.closing(Arena.create(SHARD_BYTES)) as arena:
        for _ in range(kills):
            reader, writer = os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(arena.fd), str(writer)],
                pass_fds=[arena.fd, writer],
                env=environment(),
                cwd=ROOT,
            )
            os.close(writer)
            lines = read_lines(reader, chance.randrange(1, 30))
            # a little later than a fact: the pipe is not where copies begin and end
            if chance.random() < 0.5:
                for _ in range(chance.randrange(20_000)):
                    pass
            child.send_signal(signal.SIGKILL)
            assert child.wait(DEADLINE_S) == -signal.SIGKILL
            lines += read_lines(reader, 0)
            os.close(reader)

            done = [int(line[1:]) for line in lines if line.startswith(b"c")]
            begun = max(int(line[1:]) for line in lines if line.startswith(b"b"))
            completed = max([completed, *done])
            held = [found.version for found in arena.versions()]
            if begun > completed and held[:1] == [begun]:
                assert lines[-1] == b"i%d" % begun  # published, but killed before it could say so
                completed = begun
            assert held[:1] == ([completed] if completed else [])
            interrupted += begun > completed and any(
                "never completed" in problem for problem in arena.problems()
            )
            for version in held:
                snapshot = arena.open(version)
                assert {name: bytes(snapshot.view(name)) for name in snapshot.entries} == patterned(
                    version
                )
    assert completed > kills
    assert interrupted > kills // 4, "the kills did not hit copies"
