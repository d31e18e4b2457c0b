"""The fakes themselves: virtual time and the network in memory do what they promise."""

import random

from taskd.core import events as ev
from taskd.core.node import NodeMachine
from taskd.testing import (
    FakeClock,
    FaultScript,
    MemoryNetwork,
    NetworkQuality,
    SimulatedJob,
    Trouble,
)
from taskd.testing.shells import SimulatedAgent


class TestFakeClock:
    def test_time_stands_still_until_it_is_moved(self) -> None:
        clock, seen = FakeClock(5.0), []
        clock.call_in(2.0, lambda: seen.append(("b", clock.now())))
        clock.call_at(6.0, lambda: seen.append(("a", clock.now())))
        clock.call_in(9.0, lambda: seen.append(("never", 0.0)))
        assert clock.now() == 5.0
        clock.advance(3.0)
        assert (clock.now(), seen) == (8.0, [("a", 6.0), ("b", 7.0)])

    def test_equal_moments_keep_their_order_and_the_past_is_now(self) -> None:
        clock, seen = FakeClock(5.0), []
        clock.call_at(1.0, lambda: seen.append(1))
        clock.call_at(5.0, lambda: seen.append(2))
        while clock.run_next():
            assert clock.now() == 5.0
        assert seen == [1, 2]


class TestMemoryNetwork:
    def network(self, **quality):
        clock = FakeClock()
        return clock, MemoryNetwork(clock, random.Random(0), NetworkQuality(**quality))

    def test_between_two_ends_the_order_is_kept_whatever_is_lost(self) -> None:
        clock, network = self.network(loss=0.5, jitter_s=1.0)
        seen: list[object] = []
        network.listen("b", lambda _, message: seen.append(message))
        for number in range(50):
            network.send("a", "b", number)
        clock.advance(1000.0)
        assert seen == list(range(50))

    def test_a_cut_loses_what_is_under_way_and_no_more(self) -> None:
        clock, network = self.network()
        seen: list[object] = []
        network.listen("b", lambda _, message: seen.append(message))
        network.send("a", "b", "lost")
        network.cut("b", "a")
        network.send("a", "b", "kept")
        clock.advance(1.0)
        assert seen == ["kept"]
        network.unlisten("b")
        network.send("a", "b", "to nobody")
        clock.advance(1.0)
        assert (network.dropped, network.delivered) == (2, 1)

    def test_duplicates(self) -> None:
        clock, network = self.network(duplicate=1.0)
        seen: list[object] = []
        network.listen("b", lambda sender, message: seen.append((sender, message)))
        network.send("a", "b", 1)
        clock.advance(1.0)
        assert seen == [("a", 1), ("a", 1)]


def test_a_trouble_that_finds_nobody_is_reported() -> None:
    trouble = Trouble(0.5, "kill", 99)
    assert SimulatedJob(script=FaultScript.of([trouble]), steps=5).run().missed == [trouble]


def test_scripts_are_repeatable() -> None:
    one, two = (
        FaultScript.random(random.Random(3), count=5, until=1.0, ranks=4, nodes=2) for _ in range(2)
    )
    assert one == two
    results = [SimulatedJob(nodes=2, seed=7, script=one).run(50.0) for _ in range(2)]
    assert results[0].ended_at == results[1].ended_at
    assert [story.to_dicts() for story in results[0].stories] == [
        story.to_dicts() for story in results[1].stories
    ]


def test_an_agent_that_stands_still_twice_finds_everything_in_its_order_afterwards() -> None:
    job = SimulatedJob(ranks_per_node=2)
    job.clock.advance(0.1)
    agent = job.agents[0]
    seen: list[int] = []
    agent.stand_still(1.0)
    for number, seconds in ((1, 0.1), (2, 0.3), (3, 1.1)):
        job.clock.call_in(seconds, lambda number=number: seen.append(number))
    agent._is_still(lambda: seen.append(10))
    job.clock.advance(0.2)
    agent.stand_still(0.1)  # it stands still longer than that already
    agent._is_still(lambda: seen.append(11))
    job.clock.advance(0.5)
    agent.stand_still(1.0)
    agent._is_still(lambda: seen.append(12))
    job.clock.advance(5.0)
    assert seen == [1, 2, 3, 10, 11, 12]
    assert not agent._is_still(lambda: None)


class TestPartitions:
    @staticmethod
    def seen_of(*, is_lossy: bool) -> list[tuple[float, object]]:
        clock = FakeClock()
        network = MemoryNetwork(clock, random.Random(0), NetworkQuality(jitter_s=0.0))
        seen: list[tuple[float, object]] = []
        network.listen("b", lambda _, message: seen.append((round(clock.now(), 4), message)))
        network.send("a", "b", "under way")
        network.part("b", "a", 2.0, is_lossy=is_lossy)
        network.send("a", "b", "meanwhile")
        network.send("c", "b", "of another")
        clock.advance(2.0)
        network.send("a", "b", "afterwards")
        clock.advance(1.0)
        assert not list(network.under_way("a", "b"))
        return seen

    def test_what_is_sent_while_the_link_is_down_is_lost(self) -> None:
        assert self.seen_of(is_lossy=True) == [(0.0005, "of another"), (2.0005, "afterwards")]

    def test_or_it_arrives_when_the_link_is_up(self) -> None:
        assert self.seen_of(is_lossy=False) == [
            (0.0005, "under way"), (0.0005, "of another"), (2.0005, "meanwhile"),
            (2.0005, "afterwards"),
        ]  # fmt: skip


def test_a_second_agent_on_a_taken_position_is_refused_and_the_job_goes_on() -> None:
    job = SimulatedJob(nodes=2, ranks_per_node=2, steps=10)
    assert job.manager is not None
    job.clock.advance(0.1)
    machine = NodeMachine(
        1, [2, 3], job.timeouts, node_count=2, world_size=4, agent_incarnation="impostor"
    )
    refusal = job.manager.machine.refusal(machine.registration(job.clock.now()))
    assert refusal == "node 1 is taken by another agent"
    stray = SimulatedJob(nodes=1, ranks_per_node=2, steps=10, has_manager=False)
    impostor = SimulatedAgent(9, machine, job.timeouts, stray.world, job.network)
    job.clock.advance(0.2)
    impostor._feed(ev.ManagerRefused(job.clock.now(), "refused", refusal))
    impostor.kill()
    assert job.run().succeeded
