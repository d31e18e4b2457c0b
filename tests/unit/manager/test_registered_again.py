"""All agents register again at once, as after a network that was away: what that costs.

Counted in messages and in looks at nodes, which no other load on the machine changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events
from taskd.core.job import nodes
from taskd.core.policy.peers import peers_of
from taskd.wire import codec, messages
from tests.unit.manager.peer import Peer, lost, types

if TYPE_CHECKING:
    import pytest

    from taskd.manager.service import Service
    from taskd.transport.memory import MemoryNetwork

_NODES = 400


def joined(service: Service, network: MemoryNetwork) -> list[Peer]:
    agents = [Peer(network, node_rank=rank, incarnation=f"a{rank}") for rank in range(_NODES)]
    for agent in agents:
        say_who(agent)
        agent.report(events.WorkerDeclared, agent.envelope.node_rank, 0, True)
    service.turn()
    for agent in agents:
        agent.heard()
    return agents


def say_who(agent: Peer) -> None:
    rank = agent.envelope.node_rank
    assert rank is not None
    agent.register(range(rank, rank + 1), nodes=_NODES, world=_NODES)


def test_an_order_is_repeated_to_those_who_register_again_and_to_nobody_else(
    service: Service, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = joined(service, network)
    first.report(events.WorkerLost, *lost(0))
    service.turn()
    for agent in others:
        assert types(agent.heard()) == [messages.Interrupt]
        say_who(agent)
    sent = []
    send = service._link.send
    monkeypatch.setattr(
        service._link, "send", lambda peer, data: sent.append(data) or send(peer, data)
    )
    service.turn()
    assert len(sent) == 2 * len(others)
    for agent in others:
        assert types(agent.heard()) == [messages.Accepted, messages.Interrupt]
    assert types(first.heard()) == [messages.Interrupt, messages.ReplaceWorker]
    assert codec.decode(sent[-1])[1] == codec.decode(sent[1])[1]


class Looks(dict[int, int]):
    """Pairs of nodes; counts how often one is looked at."""

    count = 0

    def __getitem__(self, node_rank: int) -> int:
        type(self).count += 1
        return super().__getitem__(node_rank)


def test_who_keeps_whose_mirrors_is_found_in_one_pass(
    service: Service, network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = joined(service, network)
    for agent in agents:
        ask_for_mirrors(agent)
    service.turn()
    assert [types(agent.heard()) for agent in agents] == [[messages.Pair]] * _NODES
    monkeypatch.setattr(nodes, "peers_of", lambda hosts: Looks(peers_of(hosts)))
    monkeypatch.setattr(Looks, "count", 0)
    ask_for_mirrors(agents[1])
    service.turn()
    (pair,) = agents[1].heard()
    assert (pair.buddy, pair.sources) == (2, ((0, "a0"),))
    assert Looks.count <= 4 * _NODES


def ask_for_mirrors(agent: Peer) -> None:
    rank = agent.envelope.node_rank
    agent.report(events.AgentMirrors, rank, f"host {rank}", f"h{rank}:1")
