"""What a fork of the warm process does about libraries that are loaded."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import TYPE_CHECKING

from taskd.agent.spawning import libraries

if TYPE_CHECKING:
    import pathlib

    import pytest


def test_what_nanobind_counts_is_given_back_at_the_end(monkeypatch) -> None:
    registered = []
    monkeypatch.setattr(libraries.atexit, "register", registered.append)
    for name in [name for name in sys.modules if name.startswith("triton._C")]:
        monkeypatch.delitem(sys.modules, name)
    libraries.free_what_is_counted()
    assert registered == []
    kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
    binding = types.ModuleType("triton._C.libtriton")
    binding.attribute = kind("attribute", (), {})
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", binding)
    libraries.free_what_is_counted()
    assert registered == [libraries.gc.unfreeze]


ENDS = """
import os, sys, weakref
import torch
from taskd.agent.spawning import libraries

class Any:
    pass

def take_down(*_):
    print("operators", flush=True)

take_down.__module__ = "torch.library"
torch.library._del_library = take_down
inherited, asked_for = torch.library.Library("inherited", "DEF"), Any()
weakref.finalize(asked_for, print, "asked for", flush=True)
libraries.keep_operators()
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
own = torch.library.Library("own", "DEF")
"""


def test_operators_are_kept_at_the_end_of_a_fork_and_no_more_than_they() -> None:
    """Its own ones are taken down, and what anybody else has asked for is done."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=True
    )
    assert sorted(ended.stdout.splitlines()) == ["asked for", "operators"]


def test_a_module_that_is_preloaded_finds_no_rank_of_the_pod(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "takes_a_rank.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in libraries.OF_A_WORKER:
        monkeypatch.setenv(name, "0")
    libraries.preload(["takes_a_rank"])
    assert sys.modules.pop("takes_a_rank").RANK is None
