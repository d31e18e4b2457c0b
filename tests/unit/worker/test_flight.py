"""What the runtime's thread writes down of gloo: real groups, two processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from taskd.native import library
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.skipif(library.load() is None, reason="libtaskd is not built")

PROGRAM = r"""
import datetime, os, sys, time
import torch, torch.distributed as dist
from taskd.native import collectives
from taskd.native.black_box import BlackBox, Phase
from taskd.worker.process.groups import Groups
from taskd.worker.life import Life
from taskd.worker.process.pulse import Pulse

rank = int(sys.argv[1])
box = BlackBox.create()
box.begin(os.getpid(), 0)
collectives.start(box)
groups = Groups(0, 0)
groups.install(lambda call: call())
pulse = Pulse(Life(rank=rank, world_size=2, incarnation=0, box=box), groups)

def beat(standing):
    # A main thread that stands is one that has marked nothing for a while.
    end = time.monotonic() + 0.7
    while standing and time.monotonic() < end:
        time.sleep(0.05)
    if not standing:
        box.mark_phase(Phase.STEP)
    pulse._next_at = pulse._count_at = pulse._calls_at = 0.0
    pulse.beat()
    groups = collectives.Collectives(box).communicators()
    found = {group.name: (group.entered, group.left) for group in groups}
    return box.is_waiting, found

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank,
                        world_size=2, timeout=datetime.timedelta(seconds=60))
second = dist.new_group([0, 1], group_desc="second")
for _ in range(5):
    dist.all_reduce(torch.ones(3))
dist.barrier(group=second)
waiting, found = beat(standing=False)
assert not waiting
# That they are complete is noted a moment after wait().
assert found[dist.group.WORLD.group_name][0] == 5, found
assert found[second.group_name][0] == 1, found
assert beat(standing=True)[0] is False          # stands, and waits for nobody
ids = {group.name: group.id for group in collectives.Collectives(box).communicators()}
gathered = [None, None]
dist.all_gather_object(gathered, ids)
assert gathered[0] == gathered[1], gathered     # the same number on all ranks

store = dist.distributed_c10d._get_default_store()
if rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    waiting, found = beat(standing=True)
    assert waiting
    newest = [call for call in collectives.Collectives(box).calls() if not call.leave_ns]
    assert [(call.name, call.bytes) for call in newest] == [("gloo:all_reduce", 12)], newest
    entered, left = found[dist.group.WORLD.group_name]
    assert entered == left + 1, found
    store.set("seen", "1")
    work.wait()
    assert beat(standing=True)[0] is False
    store.set("over", "1")
else:
    store.get("seen")
    dist.all_reduce(torch.ones(3))
    store.get("over")
print("well")
sys.stdout.flush()
os._exit(0)
"""


def test_counters_calls_and_who_waits(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ranks = [
        harness.Output(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            harness.environment(),
            tmp_path / f"rank{rank}.out",
            tmp_path,
            warm=harness.TORCHRUNS,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.wait(120).output for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    assert [output.strip().splitlines()[-1] for output in outputs] == ["well", "well"], "\n".join(
        outputs
    )
