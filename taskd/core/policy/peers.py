"""Peer nodes: which node keeps copies of which other node's snapshots.

Owns the rule. The pairs follow from who is on which host alone, so that a manager that was
restarted comes to the same ones.
"""

from collections.abc import Mapping


def peers_of(hosts: Mapping[int, str]) -> dict[int, int]:
    """The peer of each node: the next in order, around, on another host. {}: all are on one."""
    order = sorted(hosts)
    found: dict[int, int] = {}
    following: dict[int, int] = {}  # index in `twice` -> that of the next node on another host
    twice = [*order, *order]
    for index in range(len(twice) - 2, -1, -1):
        is_other = hosts[twice[index + 1]] != hosts[twice[index]]
        if is_other or index + 1 in following:
            following[index] = index + 1 if is_other else following[index + 1]
    for index, node_rank in enumerate(order):
        if index in following:
            found[node_rank] = twice[following[index]]
    return found


def served_by(pairs: Mapping[int, int]) -> dict[int, list[int]]:
    """Whose peer each node is, in order; it lacks those that are nobody's."""
    found: dict[int, list[int]] = {}
    for node_rank in sorted(pairs):
        peer = pairs[node_rank]
        found.setdefault(peer, []).append(node_rank)
    return found
