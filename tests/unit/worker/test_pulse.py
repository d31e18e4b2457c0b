"""How far the runtime says that gloo has come.

Real ranks with two groups, after a recovery, which also send to each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.native import library
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.skipif(library.load() is None, reason="libtaskd is not built")

# Ranks 0 and 1 send to each other, rank 2 does not; then rank 0 sleeps, rank 1 waits to receive,
# rank 2 in a collective.
RANK = """if True:
    import json, os, pdb, sys, threading, time
    from operator import gt
    import torch, torch.distributed as dist
    from taskd.native import collectives
    from taskd.native.black_box import BlackBox, Phase
    from taskd.worker.process.groups import Groups
    from taskd.worker.life import Life
    from taskd.worker.process.pulse import Pulse

    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3)
    box = BlackBox.create()
    box.begin(os.getpid(), 0)
    collectives.start(box)
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    groups.retire()                # a recovery: torch goes on numbering
    groups.begin(1)
    collectives.reset()
    dist.init_process_group("gloo", store=dist.PrefixStore("1", store), rank=rank, world_size=3)
    other = dist.new_group([0, 1, 2])
    pulse, tensor = Pulse(Life(rank, 3, 0, box), groups), torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=other)
    for _ in range(5):
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0) if rank == 1 else None
    dist.all_reduce(tensor)
    box.mark_phase(Phase.FORWARD)

    is_there = threading.Event()

    def look():
        is_there.wait()
        for beats in range(400):
            time.sleep(0.05)
            pulse.beat()
            seen = [box.is_waiting, box.is_debugged]
            if beats >= 39 and not any(map(gt, EXPECTED[rank], seen)):
                break  # after two seconds; later where a main thread that is to be seen is late
        groups = collectives.Collectives(box).communicators()
        groups_seen = {group.name: (group.entered, group.left) for group in groups}
        print(json.dumps([rank, groups_seen, box.is_waiting, box.is_debugged]), flush=True)
        print("looked", flush=True)  # and live on: the end of one ends what the others wait for

    threading.Thread(target=look).start()
    r, w = os.pipe()
    is_there.set()
    if rank == 1:
        WAIT
    elif rank == 2:
        dist.all_reduce(tensor)
    time.sleep(100)
"""


def run(tmp_path: pathlib.Path, wait: str, *expected: bool) -> list[list]:
    """`expected`: of rank 1, whether it is seen waiting, and in a debugger."""
    script = tmp_path / "rank.py"
    flags = [[False, False], list(expected), [True, False]]
    script.write_text(RANK.replace("WAIT", wait).replace("EXPECTED", str(flags)))
    ranks = [
        harness.Output(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            harness.environment(),
            tmp_path / f"rank{rank}.out",
            tmp_path,
            warm=harness.TORCHRUNS,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            rank.wait_text("looked\n", 50)
        lines = [rank.text.splitlines()[-2] for rank in ranks]
        # pdb writes its prompt in front
        return [json.loads(line[line.rindex(f"[{rank}, {{") :]) for rank, line in enumerate(lines)]
    finally:
        for rank in ranks:
            rank.end()


def test_what_is_sent_between_two_ranks_is_no_collective(tmp_path: pathlib.Path) -> None:
    """Ranks are compared by these numbers: they must count the same."""
    assert run(tmp_path, "dist.recv(tensor, 0)", True, False) == [
        [0, {"0": [2, 2], "1": [1, 1]}, False, False],
        # torch records no such wait, but the rank is no culprit
        [1, {"0": [2, 2], "1": [1, 1]}, True, False],
        [2, {"0": [3, 2], "1": [1, 1]}, True, False],
    ]


def test_a_wait_for_what_was_asked_for_earlier_is_one_too(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path, "dist.irecv(tensor, 0).wait()", True, False)[1] == [
        1,
        {"0": [2, 2], "1": [1, 1]},
        True,
        False,
    ]


def test_a_sleep_is_none(tmp_path: pathlib.Path) -> None:
    seen = run(tmp_path, "time.sleep(100)", False, False)
    assert seen[1] == [1, {"0": [2, 2], "1": [1, 1]}, False, False]


def test_a_debugger_is_seen(tmp_path: pathlib.Path) -> None:
    wait = "sys.stdin = open(r); breakpoint()"
    assert run(tmp_path, wait, False, True)[1] == [1, {"0": [2, 2], "1": [1, 1]}, False, True]


def test_groups_that_the_script_destroys_leave_their_place_to_later_ones() -> None:
    """One for each evaluation: the 65th was not there, and who hung in it was not found."""
    script = """if True:
    import os, torch, torch.distributed as dist
    from taskd.native import collectives
    from taskd.native.black_box import BlackBox
    from taskd.worker.life import Life
    from taskd.worker.process.groups import Groups
    from taskd.worker.process.pulse import Pulse
    box = BlackBox.create()
    box.begin(os.getpid(), 0)
    collectives.start(box)
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pulse = Pulse(Life(0, 1, 0, box), groups)
    dist.all_reduce(torch.ones(1))
    for _ in range(70):
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=group)
        pulse._count()
        dist.destroy_process_group(group)
    last = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=last)
    pulse._count()
    found = {group.name: group.entered for group in collectives.Collectives(box).communicators()}
    assert found == {"0": 1, last.group_name: 1}, found
    groups.retire()
    pulse._count()
    assert len(collectives.Collectives(box).communicators()) == 2
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
