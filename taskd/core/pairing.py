"""Buddies: which node keeps mirrors of which other node's snapshots.

Owns the pairing. It follows from who is on which host alone, so that a manager that was restarted comes to the same one, and it is made
when every node has asked: else each that comes would move the mirrors of others. Which versions a mirror holds is `Membership.mirrors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.core.events import AgentMirrors, MirrorsHeld
    from taskd.core.job import Commands, Job


def buddies(hosts: Mapping[int, str]) -> dict[int, int]:
    """The buddy of each node: the next one in order, around, that is on another host. {}: all are on one."""
    order = sorted(hosts)
    found: dict[int, int] = {}
    following: dict[int, int] = {}           # index in twice the order -> that of the next node on another host
    twice = [*order, *order]
    for index in range(len(twice) - 2, -1, -1):
        is_other = hosts[twice[index + 1]] != hosts[twice[index]]
        if is_other or index + 1 in following:
            following[index] = index + 1 if is_other else following[index + 1]
    for index, node_rank in enumerate(order):
        if index in following:
            found[node_rank] = twice[following[index]]
    return found


class Pairing:
    """One per job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._asked: dict[int, AgentMirrors] = {}
        self._told: dict[int, tuple[object, ...]] = {}       # what each node was told last
        self._is_hopeless = False

    def asked(self, event: AgentMirrors) -> Commands:
        """A node wants mirrors, or has come back and may have missed its buddy."""
        job = self._job
        self._asked[event.node_rank] = event
        self._told.pop(event.node_rank, None)
        if job.phase in (Phase.DYING, Phase.ENDING) or len(self._asked) != job.membership.joined_node_count:
            return []
        pairs = buddies({node_rank: asked.host for node_rank, asked in self._asked.items()})
        if not pairs:
            was_hopeless, self._is_hopeless = self._is_hopeless, True
            return [] if was_hopeless else [do.ReportNoBuddy(job.cause, job.generation, event.host)]
        commands: Commands = []
        nodes = job.membership.nodes
        for node_rank, buddy in sorted(pairs.items()):
            sources = tuple((other, nodes[other].agent_incarnation) for other in sorted(pairs) if pairs[other] == node_rank)
            told = (buddy, self._asked[buddy].address, nodes[buddy].agent_incarnation, sources)
            if self._told.get(node_rank) != told:
                self._told[node_rank] = told
                commands.append(do.Pair(job.cause, job.generation, node_rank, *told))
        return commands

    def held(self, event: MirrorsHeld) -> Commands:
        """What a node has."""
        self._job.membership.note_mirrors(event.node_rank, event.held)
        return []
