"""TrainerStores: where the workers of one start meet, on each node."""

from __future__ import annotations

import datetime as dt
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils.store import barrier

from taskd.torchrun.meeting import host_of, note_host
from taskd.torchrun.stores import TrainerStores

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def base() -> dist.TCPStore:
    """The store of the rendezvous."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def group(base: dist.TCPStore, node_rank: int) -> SimpleNamespace:
    handler = SimpleNamespace(get_run_id=lambda: "run", use_agent_store=True)
    store = dist.TCPStore("127.0.0.1", base.port, timeout=dt.timedelta(seconds=30))
    return SimpleNamespace(
        store=dist.PrefixStore(f"round {node_rank}", store),
        group_rank=node_rank,
        group_world_size=2,
        master_addr="127.0.0.1",
        master_port=base.port,
        spec=SimpleNamespace(rdzv_handler=handler, local_world_size=4),
    )


def meet(stores: TrainerStores) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", int(stores.environment["MASTER_PORT"]))


def test_all_nodes_meet_at_a_new_store_for_each_start(base: dist.TCPStore) -> None:
    first, second = TrainerStores(), TrainerStores()
    groups = [group(base, 0), group(base, 1)]
    ports = set()
    for generation in (1, 2, 5):
        later = threading.Thread(target=second.open, args=(groups[1], generation, 30.0))
        later.start()  # sooner than node 0
        first.open(groups[0], generation, 0.0)
        later.join(30)
        meet(first).set("who", str(generation))
        assert meet(second).get("who") == str(generation).encode()
        assert (first.generation, second.generation) == (generation, generation)
        ports.add(first.environment["MASTER_PORT"])
    assert len(ports) == 3
    assert str(base.port) not in ports
    before = dict(first.environment)
    first.open(groups[0], 5, 0.0)
    assert first.environment == before


def test_a_node_whose_first_node_opens_none_says_so(base: dist.TCPStore) -> None:
    stores = TrainerStores()
    stores.open_first(group(base, 1))
    before = dict(stores.environment)
    with pytest.raises(OSError, match="node 1: no store for the start of generation 3"):
        stores.open(group(base, 1), 3, 0.0)
    assert (stores.generation, stores.environment) == (0, before)


def test_who_has_the_store_of_the_rendezvous_tells_the_others(base: dist.TCPStore) -> None:
    """Processes that do not have it: tests/process/test_spares.py."""
    client = dist.TCPStore("127.0.0.1", base.port, timeout=dt.timedelta(seconds=30))
    assert host_of(client, "run") is None
    note_host(base, "run", 3)
    base.set("ranks", "numbered")  # `set` does not wait for the server, which keeps the order
    client.wait(["ranks"])
    assert host_of(client, "run") == 3


def test_a_store_in_a_file_is_on_no_node(tmp_path: pathlib.Path) -> None:
    base = dist.FileStore(str(tmp_path / "store"), 1)
    note_host(base, "run", 3)
    assert host_of(base, "run") is None


def _done(group: SimpleNamespace) -> None:
    """As torch's loop waits for the other nodes at the end."""
    name = api._TERMINAL_STATE_SYNC_ID
    barrier(group.store, group.group_world_size, name, barrier_timeout=60)


def test_who_has_done_its_part_is_told_that_another_node_has_failed(base: dist.TCPStore) -> None:
    waiting, failing = TrainerStores(), TrainerStores()
    first, second = group(base, 0), group(base, 1)
    second.store = dist.PrefixStore("round 0", second.store.underlying_store)
    assert waiting.failure(first) == ""
    teller = threading.Thread(target=failing.tell_failure, args=(second, "rank 1 ended"))
    with pytest.raises(dist.DistStoreError):
        barrier(first.store, 3, "another", barrier_timeout=0.1)
    teller.start()
    _done(first)  # at once, and not after the time of the barrier
    assert teller.is_alive(), "it may have the store"
    assert waiting.failure(first) == "rank 1 ended"
    teller.join(30)
    assert not teller.is_alive()


def test_so_it_is_where_the_first_store_was_lost(base: dist.TCPStore) -> None:
    waiting, failing = TrainerStores(), TrainerStores()
    first, second = group(base, 0), group(base, 1)
    address = waiting.spare(first, "127.0.0.1")
    for one in (waiting, failing):
        one.move(address)
    teller = threading.Thread(target=failing.tell_failure, args=(second, "rank 1 ended"))
    teller.start()
    waiting.await_all(2, 60.0)
    assert waiting.failure(first) == "rank 1 ended"
    teller.join(30)
    assert not teller.is_alive()
