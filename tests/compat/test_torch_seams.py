"""The torch that is installed is one that taskd knows, and one that it does not know is left alone.

`taskd/torchrun/seams.py` says what to do when a signature or a source has changed upstream.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.launcher import api

from taskd.errors import UnsupportedTorchError
from taskd.torchrun import known, patch
from taskd.torchrun.seams import KNOWN_TORCH, SEAMS, TESTED_TORCH, Seam

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = str(torch.__version__).partition("+")[0]
AGENT = local_elastic_agent.LocalElasticAgent


def resolve(seam: Seam) -> Any:
    target: Any = importlib.import_module(seam.module)
    for part in seam.attribute.split("."):
        target = getattr(target, part)
    return target


@pytest.fixture
def untouched() -> Iterator[None]:
    """Whatever happens, both replacements are torch's own again; here: nothing is replaced."""
    before = (api.launch_agent, api.LocalElasticAgent)
    yield
    assert (api.launch_agent, api.LocalElasticAgent) == before
    assert not patch.is_applied()


@pytest.mark.skipif(HERE not in KNOWN_TORCH, reason="what differs is told by the test below")
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_known_torch_looks_like_itself(seam: Seam) -> None:
    target = resolve(seam)
    assert tuple(inspect.signature(target).parameters) == seam.parameters(HERE)
    if seam.sources:
        assert known.source_hash(inspect.unwrap(target)) == seam.source(HERE), (
            f"{seam.name} has changed upstream: read the difference"
        )


def test_nothing_is_said_about_a_tested_torch_and_an_untested_one_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    known.check(torch.__version__)
    said = [record.getMessage() for record in caplog.records]
    if HERE in TESTED_TORCH:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"torch {torch.__version__} is not one that taskd is tested with")


def test_each_seam_is_known_from_the_first_version_on() -> None:
    for seam in SEAMS:
        assert next(iter(seam.signatures)) == KNOWN_TORCH[0]
        assert not seam.sources or next(iter(seam.sources)) == KNOWN_TORCH[0]
        assert {*seam.signatures, *seam.sources} <= set(KNOWN_TORCH)
    assert set(TESTED_TORCH) <= set(KNOWN_TORCH)


def test_a_hash_is_that_of_the_whole_function_and_of_nothing_else() -> None:
    for seam in SEAMS:
        if seam.sources:
            function = inspect.unwrap(resolve(seam))
            source = inspect.getsource(function).rstrip()
            expected = hashlib.sha256(source.encode()).hexdigest()[:12]
            assert known.source_hash(function) == expected
    assert not known.source_hash(len)


def test_run_py_has_one_place_for_the_import() -> None:
    """The documented sed inserts before every line that contains the text."""
    spec = importlib.util.find_spec("torch.distributed.run")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        assert [line for line in file if "import os" in line] == ["import os\n"]


def test_apply_and_revert(untouched: None) -> None:
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


# ---------------------------------------------------------------------- another torch


def renamed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The last seam: all or none, so the first is not touched either."""
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda url, something_new: None)
    return "distributed_c10d.rendezvous takes (url, something_new), known is (url, rank"


def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(AGENT, "_monitor_workers")
    monkeypatch.delattr(AGENT.__mro__[1], "_monitor_workers")
    return "LocalElasticAgent._monitor_workers is not there ("


def changed(monkeypatch: pytest.MonkeyPatch) -> str:
    def _shutdown(self, death_sig=None, timeout=30) -> None:
        """Another body."""

    _shutdown.__signature__ = inspect.signature(AGENT._shutdown)  # type: ignore[attr-defined]
    monkeypatch.setattr(AGENT, "_shutdown", _shutdown)
    return "the source of torch.distributed.elastic.agent.server.local_elastic_agent.Local"


def without_distributed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    return f"torch {torch.__version__} is built without torch.distributed"


@pytest.mark.parametrize("change", [renamed, gone, changed, without_distributed])
def test_what_differs_is_said_and_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, untouched: None, change: Any
) -> None:
    said = change(monkeypatch)
    with pytest.raises(UnsupportedTorchError) as raised:
        patch.apply()
    assert said in str(raised.value)
    assert str(raised.value).endswith(f"taskd works with torch {', '.join(KNOWN_TORCH)}")
    assert str(raised.value).count(";") == 0, "one difference is told, not those of other versions"


def test_an_untested_version_that_looks_like_a_tested_one_works_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, untouched: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.1+cpu")
    caplog.set_level(logging.WARNING)
    try:
        patch.apply()
        assert patch.is_applied()
    finally:
        patch.revert()
    (record,) = caplog.records
    assert record.getMessage().startswith("torch 3.0.1+cpu is not one that taskd is tested with")
    assert "looks as in torch 2." in record.getMessage()


def test_without_sources_the_parameters_decide_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(known.linecache, "getlines", lambda _name: [])
    caplog.set_level(logging.WARNING)
    known.check(torch.__version__)
    (record,) = caplog.records
    assert "by names of parameters alone: it is installed without sources" in record.getMessage()
    renamed(monkeypatch)
    with pytest.raises(UnsupportedTorchError, match="something_new"):
        known.check(torch.__version__)
