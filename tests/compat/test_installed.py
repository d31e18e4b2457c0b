"""The package as pip installs it where there is no torch, in a virtual environment of its own.

Nothing is downloaded: what the package requires is there as links to the packages of the tests, and
pip has no index to take anything else from.
"""

from __future__ import annotations

import email
import importlib.util
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ADVICE = "taskd needs torch here: pip install torch, or taskd[torch]"
REQUIRED = ("zmq", "pyzmq", "msgpack")
FOR_TESTS = (
    *("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments"),
    *("exceptiongroup", "tomli", "typing_extensions.py"),  # before Python 3.11
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("installed")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """Without libtaskd: that one is tested beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.so", "*.c", "__pycache__")  # written by others meanwhile
    shutil.copytree(ROOT / "taskd", source / "taskd", ignore=ignored)
    run(
        f"{sys.executable} -m pip wheel --quiet --no-build-isolation --no-deps -w dist .",
        source,
        TASKD_BUILD_NATIVE="off",
    )
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
    """The interpreter of an environment into which pip has installed the wheel, offline."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    installed = pathlib.Path(pytest.__file__).parents[1]
    for name in (*REQUIRED, *FOR_TESTS):
        for path in [installed / name, *installed.glob(f"{name}-*.dist-info")]:
            if path.exists():
                (packages / path.name).symlink_to(path)
    python = folder / "bin" / "python"
    run(f"{sys.executable} -m pip --python {python} install --quiet --no-index {wheel}", folder)
    return python


def run(command: str, folder, code: int = 0, **variables) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_torch_is_required_by_the_extra_alone(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    always = {re.split(r"[^\w-]", line)[0] for line in lines if "extra ==" not in line}
    assert always == {"pyzmq", "msgpack"}
    assert [line for line in lines if line.startswith("torch")]


def test_the_environment_has_the_package_and_no_torch(python, tmp_path) -> None:
    assert importlib.util.find_spec("torch") is not None
    code = "import importlib.util, taskd; print(taskd.__file__, importlib.util.find_spec('torch'))"
    path, torch = run(f'{python} -c "{code}"', tmp_path).stdout.split()
    assert torch == "None"
    assert pathlib.Path(path).is_relative_to(python.parents[1])


@pytest.mark.parametrize("name", ["recoverable", "TrainState", "checkpointing", "evaluating"])
def test_a_name_that_needs_torch_says_what_to_install(name, python, tmp_path) -> None:
    said = run(f"{python} -c 'from taskd import {name}'", tmp_path, code=1).stderr
    assert said.splitlines()[-1] == f"taskd.errors.MissingTorchError: {ADVICE}"


def test_the_launcher_says_what_to_install_in_one_line(python, tmp_path) -> None:
    said = run(f"{python} -m taskd.run train.py", tmp_path, code=1)
    instead = "; a training without torch: python -m taskd.rerun -- COMMAND\n"
    assert (said.stdout, said.stderr) == ("", ADVICE + instead)


def test_a_command_is_started_again(python, tmp_path) -> None:
    run(f"{python} -m taskd.rerun --max-restarts 1 -- mkdir -p made/a", tmp_path)
    said = run(f"{python} -m taskd.rerun --max-restarts 1 -- mkdir made", tmp_path, code=1).stderr
    assert [line for line in said.splitlines() if line.startswith("taskd: ")] == [
        "taskd: the command ended with exit 1: restart 1 of 1",
        "taskd: the command ended with exit 1; no restart of 1 is left",
    ]


def test_the_functions_of_the_api_do_their_work(python, tmp_path) -> None:
    """Manager, relay and worker over the wire; an agent with the callbacks of its launcher."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    copied = tmp_path / "tests" / "compat"  # beside the sources their taskd would be tested
    copied.mkdir(parents=True)
    for source in (ROOT / "tests" / "compat").glob("*.py"):
        shutil.copy(source, copied)
    chosen = "through_the_proxy or restarts_the_group or callbacks_are_called"
    out = run(
        f"{python} -m pytest -q -p no:cacheprovider -c {tmp_path}/pytest.ini "
        f"-k '{chosen}' {copied}/test_api.py {copied}/test_callbacks.py",
        tmp_path,
        PYTHONPATH=str(tmp_path),
    ).stdout
    assert "3 passed" in out


def test_checkpoints_are_listed_and_verified(python, tmp_path) -> None:
    import torch

    from taskd.checkpoint.draft import Draft
    from taskd.checkpoint.names import Kind
    from taskd.checkpoint.publish import publish
    from taskd.checkpoint.save import write

    draft = Draft(
        directory=tmp_path,
        version=20,
        job="job",
        kind=Kind.DUMP,
        attempt="first",
        writers=(0,),
        generation=0,
        world_size=1,
    )
    write(draft, 0, {"weight": torch.ones(3)}, {})
    path = publish(draft, None)
    tool = python.with_name("taskd")
    assert "dump  step 20  world 1" in run(f"{tool} dump ls .", tmp_path).stdout
    assert run(f"{tool} dump verify {path}", tmp_path).stdout == f"{path}: ok\n"
    assert run(f"{tool} dump show {path}", tmp_path, code=1).stderr == f"{ADVICE}\n"
