"""FSDP1: what a pass that was cut short leaves in the units, and what is taken for the state."""

import cut_short
import pytest

pytestmark = pytest.mark.slow

KINDS = ["flat", "flat_orig", "flat_kept", "flat_kept_orig", "flat_mixed", "flat_hybrid_orig"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_may_be_cut_short_at_any_call(world, kind):
    size = 4 if "hybrid" in kind else 2
    undisturbed = world.run(cut_short.two_steps, kind, size=size)
    results = world.run(cut_short.cut_everywhere, kind, 31, size=size)
    assert [result for result, _, _ in results] == undisturbed
    for _, cuts, same in results:
        assert cuts > 20
        assert same == cuts + 1


@pytest.mark.parametrize("place", ["forward", "backward", "before step", "summoned"])
@pytest.mark.parametrize("kind", ["flat", "flat_kept_orig", "flat_mixed", "flat_whole"])
def test_parking_frees_whole_parameters_and_optimizer_memory_changes_hands(world, kind, place):
    for report, left, parked, moved in world.run(cut_short.interrupt, kind, place, size=2):
        assert (report.version, report.clean) == (1, True)
        assert left["memories"] or kind == "flat_whole"
        assert (left["bytes"], left["gradients"], left["names"], left["hooks"], left["graphs"]) == (
            0,
            0,
            True,
            0,
            0,
        )
        assert moved == parked


@pytest.mark.parametrize("kind", ["flat", "flat_mixed"])
def test_a_gather_that_was_begun_may_end_behind_the_parking(world, kind):
    """It did so in freed memory, and the survivor crashed."""
    for report, is_whole in world.run(cut_short.leave_a_gather, kind, size=2):
        assert (report.version, report.clean, is_whole) == (1, True, True)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_parameter_written_by_a_stranger_is_noticed(world, kind):
    for report in world.run(cut_short.write_outside, kind, size=2):
        assert not report.clean
        assert "not a registered optimizer" in report.reason


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_pass_of_evaluation_and_whole_parameters_disturb_no_snapshot(world, kind):
    undisturbed = world.run(cut_short.train, kind, size=2)
    for (versions, state), expected in zip(
        world.run(cut_short.evaluate_between, kind, size=2), undisturbed, strict=True
    ):
        assert versions == [3, 4]
        assert state == expected
