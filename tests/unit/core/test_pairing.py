"""Buddies: never on the same host, the same whoever computes them.

And what mirrors are worth when a node is lost.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.policy.peers import peers_of
from tests.unit.core.answers import kinds, only

HOSTS = st.dictionaries(st.integers(0, 40), st.sampled_from("abcd"), max_size=24)


@given(HOSTS)
def test_a_buddy_is_the_next_node_on_another_host(hosts: dict[int, str]) -> None:
    pairs = peers_of(hosts)
    if len(set(hosts.values())) < 2:
        assert pairs == {}
        return
    assert set(pairs) == set(hosts)
    order = sorted(hosts)
    for node, buddy in pairs.items():
        assert hosts[buddy] != hosts[node]
        start = order.index(node)
        around = [*order[start + 1 :], *order[:start]]
        assert all(hosts[between] == hosts[node] for between in around[: around.index(buddy)])


@given(HOSTS, st.randoms())
def test_the_order_in_which_nodes_are_known_does_not_matter(hosts: dict[int, str], chance) -> None:
    shuffled = list(hosts.items())
    chance.shuffle(shuffled)
    assert peers_of(dict(shuffled)) == peers_of(hosts)


@given(HOSTS)
def test_on_hosts_of_one_node_each_has_one_source(hosts: dict[int, str]) -> None:
    alone = {node: str(node) for node in hosts}
    pairs = peers_of(alone)
    assert sorted(pairs.values()) == (sorted(alone) if len(alone) > 1 else [])


def ask(job, node: int, host: str) -> list[do.Command]:
    return job.send(ev.AgentMirrors, node, host, f"address-{node}:1")


@pytest.fixture
def trio(manager):
    """Three nodes of two ranks that may only dump; every rank has a shard of its own."""
    job = manager(nodes=3, per_node=2, strategies="dump").joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"s{rank}")
    return job


class TestPairing:
    def test_nodes_are_paired_when_all_have_asked(self, trio) -> None:
        assert ask(trio, 0, "a") == ask(trio, 2, "c") == []
        pairs = ask(trio, 1, "b")
        assert [
            (pair.node_rank, pair.buddy, pair.address, pair.incarnation, pair.sources)
            for pair in pairs
        ] == [
            (0, 1, "address-1:1", "agent1", ((2, "agent2"),)),
            (1, 2, "address-2:1", "agent2", ((0, "agent0"),)),
            (2, 0, "address-0:1", "agent0", ((1, "agent1"),)),
        ]

    def test_one_that_comes_back_is_told_again_and_nobody_else(self, trio) -> None:
        for node, host in enumerate("abc"):
            ask(trio, node, host)
        trio.register(1)
        assert [(pair.node_rank, pair.buddy) for pair in ask(trio, 1, "b")] == [(1, 2)]

    def test_another_address_is_told_to_whom_it_concerns(self, trio) -> None:
        for node, host in enumerate("abc"):
            ask(trio, node, host)
        pairs = trio.send(ev.AgentMirrors, 1, "b", "elsewhere:1")
        assert [(pair.node_rank, pair.address) for pair in pairs] == [
            (0, "elsewhere:1"),
            (1, "address-2:1"),
        ]

    def test_on_one_host_that_is_said_once(self, trio) -> None:
        ask(trio, 0, "a")
        ask(trio, 1, "a")
        assert only(ask(trio, 2, "a"), do.ReportNoBuddy).host == "a"
        assert ask(trio, 2, "a") == []

    def test_a_manager_that_is_new_comes_to_the_same(self, manager, trio) -> None:
        first = [command for node, host in enumerate("abb") for command in ask(trio, node, host)]
        later = manager(nodes=3, per_node=2, strategies="dump").joined()
        second = [command for node in (2, 0, 1) for command in ask(later, node, "abb"[node])]
        assert [(pair.node_rank, pair.buddy, pair.sources) for pair in first] == [
            (pair.node_rank, pair.buddy, pair.sources) for pair in second
        ]

    def test_a_job_that_ends_pairs_nobody(self, trio) -> None:
        trio.send(ev.AgentLeft, 2, "failed", "")
        assert [command for node in (0, 1) for command in ask(trio, node, "ab"[node])] == []


def lose_node_2(job, *, held: tuple[tuple[int, tuple[int, ...]], ...]) -> list[do.Command]:
    """Node 0 mirrors it. Everybody else has come out with snapshots of 6 and 9."""
    assert kinds(job.send(ev.AgentLeft, 2, "failed", "")) == ["Interrupt"]
    assert job.send(ev.MirrorsHeld, 0, held) == []
    assert job.send(ev.MirrorsHeld, 1, ((0, (9,)), (1, (9,)))) == []
    commands: list[do.Command] = []
    for rank in range(4):
        assert commands == []
        commands = job.pause(rank, 10, snapshots=(6, 9))
    return commands


class TestNodeLoss:
    def test_its_ranks_hold_what_the_buddy_mirrors_and_ranks_of_the_buddy_write_it(
        self, trio
    ) -> None:
        dump = only(lose_node_2(trio, held=((4, (6, 9)), (5, (6, 9)))), do.Dump)
        assert (dump.version, dump.writers) == (9, (0, 1, 2, 3))
        assert dict(dump.orphaned).keys() == {4, 5}
        assert set(dict(dump.orphaned).values()) == {0, 1}, "they are on node 0"
        assert dump.reason.startswith("the agent of node 2 left")

    def test_it_explains_the_communication_that_broke_before(self, trio) -> None:
        trio.raise_(0, "RuntimeError: closed by peer", kind=FaultKind.COMMUNICATION, snapshots=(6,))
        assert kinds(trio.tick()) == ["Interrupt"]
        trio.send(ev.MirrorsHeld, 0, ((4, (6,)), (5, (6,))))
        for rank in (1, 2, 3):
            trio.pause(rank, 10, snapshots=(6,))
        dump = only(trio.send(ev.AgentLeft, 2, "failed", ""), do.Dump)
        assert (dump.version, dump.reason) == (6, "the agent of node 2 left (failed)")

    def test_the_newest_version_of_which_every_mirror_is_whole(self, trio) -> None:
        assert only(lose_node_2(trio, held=((4, (6, 9)), (5, (6,)))), do.Dump).version == 6

    def test_snapshots_that_it_had_itself_are_lost_with_it(self, trio) -> None:
        trio.machine.membership.members[4].snapshots = (6, 9)
        end = only(lose_node_2(trio, held=((5, (6, 9)),)), do.GiveUp)
        assert (
            "no version of the state is complete: shard s4 (rank 4) has no live copy and no "
            "snapshot"
        ) in end.reason

    def test_what_a_node_said_of_mirrors_goes_with_it(self, trio) -> None:
        trio.send(ev.MirrorsHeld, 0, ((4, (6, 9)), (5, (6, 9))))
        trio.send(ev.AgentLeft, 2, "failed", "")
        trio.send(ev.AgentLeft, 0, "failed", "")
        trio.pause(2, 10, snapshots=(6, 9))
        assert only(trio.pause(3, 10, snapshots=(6, 9)), do.GiveUp)

    def test_a_node_that_is_there_answers_for_itself(self, trio) -> None:
        """The mirror of a dead rank is not asked while its node lives."""
        trio.lose(4, FaultKind.KILLED, "SIGKILL", snapshots=(6,))
        trio.send(ev.MirrorsHeld, 0, ((4, (9,)),))
        for rank in (0, 1, 2, 3):
            trio.pause(rank, 10, snapshots=(6, 9))
        dump = only(trio.pause(5, 10, snapshots=(6, 9)), do.Dump)
        assert (dump.version, dump.orphaned) == (6, ((4, 5),))

    def test_after_a_resume_only_what_is_said_anew_counts(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        job.send(ev.MirrorsHeld, 0, ((1, (6,)),))
        job.lose(1)
        job.pause(0, 7)
        assert only(job.pause(1, None), do.Resume)
        assert job.machine.membership.mirrors == {}
