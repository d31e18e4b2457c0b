"""What several tests of libtaskd use."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from taskd.native.black_box import BlackBox

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def crashes(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("crashes") / "libcrashes.so"
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-fno-optimize-sibling-calls",
            "-w",
            "-pthread",
            str(HERE / "crashes.c"),
            "-o",
            str(path),
        ],
        check=True,
    )
    return str(path)


@pytest.fixture(scope="session")
def throws(tmp_path_factory) -> str:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    path = tmp_path_factory.mktemp("throws") / "libthrows.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", str(HERE / "crashes.cpp"), "-o", str(path)], check=True
    )
    return str(path)


@pytest.fixture
def box():
    with contextlib.closing(BlackBox.create()) as made:
        yield made
