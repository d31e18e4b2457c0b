"""The default group that a script makes outside its function.

Who waits before it, and who makes it again.
"""

import threading

import pytest
import torch.distributed as dist

from taskd.worker.process.outer_group import OuterGroup


class Gate:
    """The gate, the verdict and the orders as far as this is concerned.

    The gate opens once, after a recovery.
    """

    def __init__(self, *, must_gate=False):
        self.story = []
        self.condition = threading.Condition()
        self.must_gate, self.is_inside = must_gate, False

    def wait(self, **_held):
        if not self.must_gate:
            return False
        self.story.append("gate")
        self.must_gate = False
        return True

    def await_on(self, error, *, clean):
        self.story.append(f"reported {error}")
        self.must_gate = True


def outer_group(gate, *, is_of_job):
    return OuterGroup(0, gate, gate, gate, is_of_job=is_of_job)


def test_a_replacement_waits_wherever_its_init_stands():
    gate = Gate(must_gate=True)
    group = outer_group(gate, is_of_job=True)
    group.around_init(lambda: gate.story.append("init"))
    assert gate.story == ["gate", "init"]


@pytest.mark.parametrize("declared", [False, True])
def test_a_survivor_makes_again_what_it_had_made_before_the_decorator(declared):
    gate = Gate()
    group = outer_group(gate, is_of_job=declared)
    group.around_init(lambda: gate.story.append("init"))
    assert group.remake()
    assert gate.story == ["init", "init"]


def test_what_is_made_within_the_function_is_made_by_the_function():
    gate = Gate()
    gate.is_inside = True
    group = outer_group(gate, is_of_job=True)
    group.around_init(lambda: gate.story.append("init"))
    assert group.remake()
    assert gate.story == ["init"]


def test_a_second_fault_before_it_is_made_again_makes_nothing():
    gate = Gate()
    group = outer_group(gate, is_of_job=True)
    group.around_init(lambda: gate.story.append("init"))
    gate.must_gate = True
    assert not group.remake()
    assert gate.story == ["init"]


def broken_once(gate, *, interrupted):
    def init():
        gate.story.append("init")
        if gate.story.count("init") == 1:
            gate.must_gate = interrupted
            raise RuntimeError("Connection closed by peer")

    return init


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_second_fault_meanwhile_makes_it_start_over(interrupted):
    gate = Gate()
    outer_group(gate, is_of_job=True).around_init(broken_once(gate, interrupted=interrupted))
    reported = [] if interrupted else ["reported Connection closed by peer"]
    assert gate.story == ["init", *reported, "gate", "init"]


def test_a_script_that_uses_nothing_of_taskd_gets_its_error():
    gate = Gate()
    with pytest.raises(RuntimeError, match="closed by peer"):
        outer_group(gate, is_of_job=False).around_init(broken_once(gate, interrupted=False))
    assert gate.story == ["init"]


def test_a_group_that_the_script_has_destroyed_is_not_there_in_later_entries():
    gate = Gate()
    group = outer_group(gate, is_of_job=False)
    group.around_init(
        lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    )
    dist.destroy_process_group()
    group.note_entry()
    assert group.remake()
    assert not dist.is_initialized()
