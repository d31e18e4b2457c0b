"""taskd.mindspore where there is no MindSpore: it can be imported, and says what it needs."""

import subprocess
import sys

import pytest


def test_importing_it_needs_neither_mindspore_nor_torch_and_using_it_says_what_is_missing() -> None:
    code = """
import sys
for name in ("mindspore", "torch", "numpy"):
    sys.modules[name] = None
import importlib.util
importlib.util.find_spec = lambda name: None
import taskd.mindspore
assert not {"zmq"} & set(sys.modules)
try:
    taskd.mindspore.TrainState
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said == (
        'MissingMindSporeError taskd.mindspore needs MindSpore: pip install mindspore "numpy<2"\n'
    )


def test_a_name_that_it_has_not_is_an_attribute_error() -> None:
    import taskd.mindspore

    with pytest.raises(AttributeError, match="has no attribute 'Trainstate'"):
        taskd.mindspore.Trainstate  # noqa: B018
