"""The torch that is installed is the torch that taskd knows.

Signatures, and sources that we rely on closely.

A failing hash means: read the difference upstream, decide whether our override still fits, then pin
the new hash.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from typing import Any

import pytest
import torch

from taskd.torchrun import patch
from taskd.torchrun.seams import SEAMS, Seam

PINNED_TORCH = "2.13.0"
_LOCAL_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
SOURCES = {
    "torch.distributed.launcher.api:launch_agent": (
        "01534e5e0ad77098652dc3369f50648d3ac39115a4cdccb0b63e0259fef25e1d"
    ),
    f"{_LOCAL_AGENT}._start_workers": (
        "3a15b68937f57e63dfb8170bdaf594549dc56834ba4044f0add822f4d9911d48"
    ),
    f"{_LOCAL_AGENT}._monitor_workers": (
        "4ba1c04fe76bba956bd52714a1ef79e3f854cec44112b9a45fa2e1e03af2868b"
    ),
    f"{_LOCAL_AGENT}._shutdown": (
        "615c6a545ee67bcfdfff7508e4b8cde6f724acf722e84e2a219d5d690fd85d22"
    ),
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._invoke_run": (
        "376e457facabbfbc2648caa55c2c35b8c39878cfe17bbb9b49a8afb5cc1cf3e0"
    ),
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._initialize_workers": (
        "14311253e222ba2ad1464493c0cba603e34e36ac6990f97ff448a45a1e1ea89f"
    ),
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._exit_barrier": (
        "a61566b289e570865d44ab4ab4374421670977db2fbabc3af3ed9ac04a62738e"
    ),
    "torch.distributed.elastic.multiprocessing.api:PContext.__init__": (
        "43744303aecbb7530118637527509dc7bd8b96bb0d2989f5fba36b164d647671"
    ),
    "torch.distributed.elastic.multiprocessing.api:PContext.start": (
        "72136724708b8574f4ce275bcb0bd30ed04bdbb7f9988098d2fe47b0fcfe2ffd"
    ),
    "torch.distributed.elastic.multiprocessing.api:PContext.close": (
        "b77c260c4568f068fc903e8d93d231930b4d75701f98e25c543effdb454e7ecc"
    ),
}


def resolve(module: str, attribute: str) -> Any:
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        target = getattr(target, part)
    return inspect.unwrap(target)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.module}.{seam.attribute}")
def test_signature(seam: Seam) -> None:
    assert (
        tuple(inspect.signature(resolve(seam.module, seam.attribute)).parameters) == seam.parameters
    )


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED_TORCH,
    reason=f"hashes are those of torch {PINNED_TORCH}",
)
def test_source(name: str) -> None:
    module, _, attribute = name.partition(":")
    source = inspect.getsource(resolve(module, attribute))
    assert hashlib.sha256(source.encode()).hexdigest() == SOURCES[name], (
        f"{name} has changed upstream: read the difference"
    )


def test_run_py_has_one_place_for_the_import() -> None:
    """The documented sed inserts before every line that contains the text."""
    spec = importlib.util.find_spec("torch.distributed.run")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        assert [line for line in file if "import os" in line] == ["import os\n"]


def test_apply_and_revert() -> None:
    from torch.distributed.launcher import api

    before = (api.launch_agent, api.LocalElasticAgent)
    try:
        patch.apply()
        patched = (api.launch_agent, api.LocalElasticAgent)
        patch.apply()
        assert (api.launch_agent, api.LocalElasticAgent) == patched
        assert patched[0] is not before[0]
        assert patched[0].__wrapped__ is before[0]
        assert issubclass(patched[1], before[1])
    finally:
        patch.revert()
    assert (api.launch_agent, api.LocalElasticAgent) == before
    assert not patch.is_applied()


def test_unknown_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or none: the last seam does not fit, so the first is not touched either."""
    from torch.distributed import distributed_c10d
    from torch.distributed.launcher import api

    before = (api.launch_agent, api.LocalElasticAgent)
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda url, something_new: None)
    with pytest.raises(patch.UnsupportedTorchError, match="something_new"):
        patch.apply()
    assert (api.launch_agent, api.LocalElasticAgent) == before
    assert not patch.is_applied()


def test_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.1+cpu")
    with pytest.raises(patch.UnsupportedTorchError, match=r"torch 3\.0\.1"):
        patch.apply()
    assert not patch.is_applied()
