"""What a torchrun says when the others have not come to the rendezvous."""

from __future__ import annotations

import types

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from taskd.config import AgentConfig
from taskd.torchrun.places import Places

_MISSING = DistStoreError("Timed out after 6 seconds waiting for clients. 1/2 clients joined.")
_NOBODY = DistNetworkError(
    "The client socket has timed out after 60000ms while trying to connect to (h, 1).\nmore"
)


@pytest.fixture
def places() -> Places:
    inner = types.SimpleNamespace(world_size=2)
    return Places(inner, None, AgentConfig.load({}), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [_MISSING, RendezvousTimeoutError()])
def test_a_torchrun_is_missing(places, error) -> None:
    said = places.not_met("h:1", error)
    assert said.startswith("the nodes of --nnodes=2 have not met at h:1: ")
    assert said.endswith(
        ". Start a torchrun for each node, all with the same --nnodes and the same address."
    )


@pytest.mark.parametrize("error", [_NOBODY, RendezvousConnectionError("The connection failed.")])
def test_the_host_of_the_rendezvous_is_lost_or_its_job_is_over(places, error) -> None:
    said = places.not_met("h:1", error)
    assert "Nobody answers there: " in said
    assert said.endswith(" with the address of a host that is there.")
    assert "\n" not in said


def test_the_others_do_not_come_to_a_restart(places) -> None:
    said = places.not_met("h:1", _MISSING, is_again=True)
    assert said.startswith("the nodes of --nnodes=2 have not met again at h:1: ")
    assert "The others have ended, or are out of reach" in said
    said = places.not_met("h:1", RendezvousConnectionError("Broken pipe"), is_again=True)
    assert "h:1: Broken pipe. The others have ended, or" in said
    assert said.endswith(" Start all torchruns again.")
