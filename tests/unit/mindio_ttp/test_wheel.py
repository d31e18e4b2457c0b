"""The wheel: `pip3 install $MINDIO_TTP_PKG` in an image that has taskd."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import taskd

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "packages" / "mindio_ttp"


def run(command, **environment):
    ended = subprocess.run(
        command, shell=isinstance(command, str), env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pip3") is None, reason="no pip3 on the path")
def test_it_is_built_and_installed_by_the_line_of_the_documents(tmp_path):
    copy = tmp_path / "mindio_ttp"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg*"))
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    built = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(copy))
    run([sys.executable, "-m", "pip", *built], **offline)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"mindio_ttp-{taskd.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert f"Requires-Dist: taskd=={taskd.__version__}" in archive.read(metadata).decode()
    # an environment of its own that sees the taskd and the torch of this one
    site = tmp_path / "site"
    run(
        "pip3 install $MINDIO_TTP_PKG",
        **offline, MINDIO_TTP_PKG=str(wheel), PIP_TARGET=str(site), PIP_NO_DEPS="1",
    )  # fmt: skip
    said = run(
        [sys.executable, "-c", "import mindio_ttp.framework_ttp as f; print(f.__file__)"],
        PYTHONPATH=f"{site}:{ROOT}",
    )
    assert said.startswith(str(site))
