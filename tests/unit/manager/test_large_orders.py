"""What the manager has to say, and is longer than a message may be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import commands, events
from taskd.core.phase import JobPhase
from taskd.core.votes import Roster, Voter, fitting
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import codec, messages, translate
from tests.unit.manager.peer import Peer, types

if TYPE_CHECKING:
    import pathlib

    from taskd.testing.clock import FakeClock
    from taskd.transport.memory import MemoryNetwork

_SPARES = 4096  # as many as may wait
_RANKS = 30_000  # that all go back to a snapshot
_LONGEST_ADDRESS = f"{'h' * 253}:65535"


def resume() -> commands.Resume:
    moves = tuple(commands.Move(rank, None, 70_000) for rank in range(_RANKS))
    return commands.Resume("test", 1, 70_000, moves, 0)


def restart() -> commands.RestartGroup:
    lives = tuple((rank, 200) for rank in range(2 * _RANKS))
    return commands.RestartGroup("test", 1, 1, "all are gone", lives)


@pytest.mark.parametrize("order", [resume(), restart()], ids=lambda order: type(order).__name__)
def test_a_job_whose_order_fits_into_no_message_is_given_up_with_the_reason(
    service, agent, lines, order
) -> None:
    service._executor.execute_all([order, commands.Interrupt("test", 1, "also decided")])
    assert types(agent.heard()) == [messages.Interrupt, messages.GiveUp]
    assert service._machine.phase is JobPhase.ENDING
    (said,) = [one.getMessage() for one in lines.records if one.levelno == logging.ERROR]
    name = type(order).__name__
    assert said.startswith(f"the job is given up: an order fits into no message: {name} has ")
    assert said.endswith(f" bytes, allowed are {codec.MAX_MESSAGE_BYTES}")


def test_an_order_beside_the_recovery_that_fits_into_no_message_costs_no_job(
    service, agent, lines
) -> None:
    sources = tuple((node_rank, "a" * 32) for node_rank in range(8192))
    service._executor.execute_all([commands.Pair("test", 0, 0, 1, "h:1", "b0", sources)])
    assert agent.heard() == []
    assert "the order Pair was dropped" in lines.text
    assert service._machine.phase is not JobPhase.ENDING


@pytest.mark.parametrize("nodes", [2, 3])
def test_who_hears_of_an_election_are_as_many_as_a_message_has_room_for(
    network: MemoryNetwork, clock: FakeClock, tmp_path: pathlib.Path, lines, nodes: int
) -> None:
    """All spares that may wait, of one stranger: what they say ended the manager."""
    log = LogConfig(tmp_path / "log")
    config = ManagerConfig("job", "", 30.0, None, log, strategies=("recover",), reschedule_s=60.0)
    service = Service(config, MemoryRouter(network, "manager"), clock)
    agents = [Peer(network, node_rank=rank, incarnation=f"a{rank}") for rank in range(nodes)]
    for rank, one in enumerate(agents):
        known = (
            rank,
            f"a{rank}",
            nodes,
            nodes,
            3,
            0,
            0,
            (events.WorkerReport(rank, 0, "running"),),
        )
        one.say(messages.MESSAGE_BY_RECORD[events.AgentRegistered](*known, voter=f"h{rank}:1"))
    stranger = Peer(network, role="spare", node_rank=None)
    kind = messages.MESSAGE_BY_RECORD[events.SpareRegistered]
    for number in range(_SPARES):
        address = f"{number}:1".rjust(64, "x")
        stranger.say(kind("host", "name", listens=address), incarnation=str(number))
    service.turn()
    (told,) = [one for one in agents[0].heard() if isinstance(one, messages.KeepRoster)]
    assert len(told.roster.voters) == nodes
    assert 2900 < len(told.roster.listeners) < _SPARES
    assert "addresses have no room" in lines.text


def test_addresses_are_left_out_from_the_end_and_the_rest_fits() -> None:
    others = [f"[2001:db8:1234:5678:9abc:def0:1234:{number:04x}]:40000" for number in range(5201)]
    assert list(fitting(others[:4000])) == others[:4000]
    some = fitting(others)
    assert 4000 < len(some) < len(others)
    assert list(some) == others[: len(some)]
    assert list(fitting(["x" * codec.MAX_MESSAGE_BYTES, "h:1"])) == []
    voters = tuple(Voter(rank, "a" * 32, _LONGEST_ADDRESS) for rank in range(99))
    former = (tuple(voter.name for voter in voters),) * 3
    roster = Roster(1, 1, 5300, 8, voters, former, some)
    envelope = codec.Envelope("job" * 20, "manager", None, None, "m" * 32, 0, 1, "roster")
    order = commands.KeepRoster("roster", 0, roster)
    assert codec.encode(envelope, translate.command_to_message(order))
