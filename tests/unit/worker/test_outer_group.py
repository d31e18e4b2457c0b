"""The default group that a script makes outside its function.

Who waits before it, and who makes it again.
"""

import threading

import pytest
import torch.distributed as dist

from taskd.worker.process.outer_group import OuterGroup


class Gate:
    """A runtime as far as this is concerned: the gate opens once, after a recovery."""

    def __init__(self, *, must_gate=False, declared=False):
        self.story = []
        self.condition = threading.Condition()
        self.must_gate, self.declared, self.is_inside = must_gate, declared, False
        self.life = type("Life", (), {"rank": 0})()

    def gate(self, **_held):
        if not self.must_gate:
            return False
        self.story.append("gate")
        self.must_gate = False
        return True

    def await_verdict(self, error, *, clean):
        self.story.append(f"reported {error}")
        self.must_gate = True


@pytest.mark.parametrize("declared", [False, True])
def test_a_replacement_waits_wherever_its_init_stands(declared):
    runtime = Gate(must_gate=True, declared=declared)
    group = OuterGroup(runtime, is_replacement=True)
    group.around_init(lambda: runtime.story.append("init"))
    assert runtime.story == ["gate", "init"]


@pytest.mark.parametrize("declared", [False, True])
def test_a_survivor_makes_again_what_it_had_made_before_the_decorator(declared):
    runtime = Gate(declared=declared)
    group = OuterGroup(runtime, is_replacement=False)
    group.around_init(lambda: runtime.story.append("init"))
    assert group.remake()
    assert runtime.story == ["init", "init"]


def test_what_is_made_within_the_function_is_made_by_the_function():
    runtime = Gate(declared=True)
    runtime.is_inside = True
    group = OuterGroup(runtime, is_replacement=False)
    group.around_init(lambda: runtime.story.append("init"))
    assert group.remake()
    assert runtime.story == ["init"]


def broken_once(runtime, *, interrupted):
    def init():
        runtime.story.append("init")
        if runtime.story.count("init") == 1:
            runtime.must_gate = interrupted
            raise RuntimeError("Connection closed by peer")

    return init


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_second_fault_meanwhile_makes_it_start_over(interrupted):
    runtime = Gate()
    OuterGroup(runtime, is_replacement=True).around_init(
        broken_once(runtime, interrupted=interrupted)
    )
    reported = [] if interrupted else ["reported Connection closed by peer"]
    assert runtime.story == ["init", *reported, "gate", "init"]


def test_a_script_that_uses_nothing_of_taskd_gets_its_error():
    runtime = Gate()
    with pytest.raises(RuntimeError, match="closed by peer"):
        OuterGroup(runtime, is_replacement=False).around_init(
            broken_once(runtime, interrupted=False)
        )
    assert runtime.story == ["init"]


def test_a_group_that_the_script_has_destroyed_is_not_there_in_later_entries():
    runtime = Gate()
    group = OuterGroup(runtime, is_replacement=False)
    group.around_init(
        lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    )
    dist.destroy_process_group()
    group.note_entry()
    assert group.remake()
    assert not dist.is_initialized()
