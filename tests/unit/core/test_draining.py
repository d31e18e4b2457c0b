"""What a node that is to end does, and when it ends without having saved."""

from taskd.core.node.draining import Draining, Step


def test_the_manager_is_told_once_and_the_node_waits_for_its_grace_period() -> None:
    draining = Draining(25.0)
    assert draining.step(0.0, None) is Step.WAIT
    assert draining.ask(100.0)
    assert draining.deadline == 125.0
    assert draining.step(100.0, None) is Step.TELL
    assert draining.step(101.0, None) is Step.WAIT
    assert draining.step(124.9, 110.0) is Step.WAIT  # it knows, and may come back
    assert draining.step(125.0, None) is Step.END


def test_a_node_waits_for_a_manager_that_may_come() -> None:
    draining = Draining(25.0)
    assert draining.ask(100.0)
    assert draining.step(101.9, 102.0) is Step.WAIT
    assert draining.step(102.0, 102.0) is Step.END
    assert draining.step(124.9, 900.0) is Step.WAIT
    assert draining.step(125.0, 900.0) is Step.END
    assert not draining.is_told
    draining.cancel()
    assert not draining.is_asked


def test_another_manager_is_told_again() -> None:
    draining = Draining(25.0)
    assert draining.ask(100.0)
    assert draining.step(100.0, None) is Step.TELL
    draining.meet_manager()
    assert draining.step(101.0, None) is Step.TELL
    assert draining.step(126.0, None) is Step.END


def test_the_second_signal_ends_the_wait_unless_it_is_the_same() -> None:
    draining = Draining(25.0)
    assert draining.ask(100.0)
    assert draining.ask(104.9), "the same one, in another way"
    assert draining.deadline == 125.0
    assert not draining.ask(105.0)
    assert not draining.is_asked
    assert draining.deadline is None


def test_signals_to_workers_say_nothing_new() -> None:
    draining = Draining(25.0)
    draining.hear(100.0, "SIGTERM to rank 2")
    assert (draining.deadline, draining.detail) == (125.0, "SIGTERM to rank 2")
    assert draining.ask(101.0)
    draining.hear(124.0, "SIGTERM to rank 0")
    assert (draining.deadline, draining.detail) == (125.0, "SIGTERM to rank 2")
