"""The warning of a store that cannot be made again in the next entry."""

import pytest

from taskd.worker.process.groups import Groups
from taskd.worker.process.own_store import OwnStore


@pytest.fixture
def own_store():
    return OwnStore(3)


def served():
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def said(caplog) -> list[str]:
    return [record.getMessage()[:50] for record in caplog.records]


def test_one_that_is_made_in_each_entry_is_warned_of_once(own_store, caplog) -> None:
    """The next entry could not bind its port, again and again, until the job was given up."""
    import torch.distributed as dist

    own_store.note_entry()
    store = served()
    groups = Groups(0, 0)
    groups.install(lambda call: call(), own_store.look_at)
    try:
        for given in (store, dist.PrefixStore("a", dist.PrefixStore("b", store))):
            dist.init_process_group("gloo", None, store=given, rank=0, world_size=1)
            groups.retire()
            assert said(caplog) == ["rank 3: init_process_group was given a TCPStore th"]
    finally:
        groups.uninstall()


@pytest.mark.parametrize("which", ["made before", "of others", "no TCP", "none"])
def test_other_stores_are_the_scripts_affair(own_store, caplog, which: str) -> None:
    import torch.distributed as dist

    first = served()
    own_store.note_entry()
    client = dist.TCPStore("127.0.0.1", first.port, None, False)
    others = {"made before": first, "of others": client, "no TCP": dist.HashStore(), "none": None}
    own_store.look_at(others[which])
    assert said(caplog) == []


def test_outside_the_function_a_store_is_made_once(own_store, caplog) -> None:
    store = served()
    own_store.look_at(store)
    assert said(caplog) == []
