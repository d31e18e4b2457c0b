"""What a fork of the warm process does about libraries that are loaded."""

import sys
import types

from taskd.agent.spawning import libraries


def test_what_nanobind_counts_is_given_back_at_the_end(monkeypatch) -> None:
    registered = []
    monkeypatch.setattr(libraries.atexit, "register", registered.append)
    for name in ("numpy.random", "torch", "multiprocessing.util"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [name for name in sys.modules if name.startswith("triton._C")]:
        monkeypatch.delitem(sys.modules, name)
    libraries.refresh({}, {})
    assert registered == []
    kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
    binding = types.ModuleType("triton._C.libtriton")
    binding.attribute = kind("attribute", (), {})
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", binding)
    libraries.refresh({}, {})
    assert registered == [libraries.gc.unfreeze]
