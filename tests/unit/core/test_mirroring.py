"""Which snapshots may be copied to a peer node, after each command of the manager."""

import pytest

from taskd.core import commands
from taskd.core.policy.mirroring import MirrorPermission

INTERRUPT = commands.Interrupt("c", 3, "a fault")
RESUME = commands.Resume("c", 3, 20, (), 0)
RESTART = commands.RestartGroup("c", 3, 0, "a fault", ((0, 1),))


def test_an_interrupt_lets_no_copy_begin_until_the_job_goes_on() -> None:
    frozen = MirrorPermission().after(INTERRUPT)
    assert not frozen.may_begin(3, 10)
    assert not frozen.is_void(0, 10)  # what there is stays
    assert frozen.after(INTERRUPT) == frozen
    assert frozen.after(RESUME).may_begin(3, 10)
    assert frozen.after(RESTART).may_begin(3, 10)


@pytest.mark.parametrize(
    ("generation", "version", "is_void"),
    [(2, 20, False), (2, 21, True), (3, 21, False), (4, 99, False), (0, 0, False)],
)
def test_what_is_beyond_the_resumed_version_is_void_unless_made_since(
    generation: int, version: int, is_void: bool
) -> None:
    resumed = MirrorPermission().after(INTERRUPT).after(RESUME)
    assert resumed.is_void(generation, version) is is_void
    assert resumed.may_begin(generation, version) is not is_void


def test_after_a_start_from_nothing_only_new_snapshots_count() -> None:
    for command in (RESTART, commands.Resume("c", 3, None, (), 0)):
        begun_anew = MirrorPermission().after(command)
        assert begun_anew.is_void(2, 0)
        assert not begun_anew.is_void(3, 0)


def test_other_commands_change_nothing() -> None:
    frozen = MirrorPermission().after(INTERRUPT)
    assert frozen.after(commands.Release("c", 3)) is frozen
