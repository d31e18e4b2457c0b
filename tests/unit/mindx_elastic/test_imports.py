"""Without MindSpore and without torch: everything can be imported, and what needs one says so."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

import mindx_elastic
import taskd

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "packages" / "mindx_elastic"
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mindspore", "taskd"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str, *, hidden: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", (HIDE if hidden else "") + code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{PACKAGE}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )


def test_the_version_is_that_of_taskd() -> None:
    assert mindx_elastic.__version__ == taskd.__version__


def test_the_documented_lines_can_be_imported_without_either_framework() -> None:
    done = run("""
import mindx_elastic, mindx_elastic.api
from mindx_elastic.terminating_message import ExceptionCheckpoint
from mindx_elastic.restore_module import RestoreStrategyGenerator
from mindx_elastic.torch_exception_module import exception_checkpoint
assert exception_checkpoint._group_info is None
assert exception_checkpoint._save_func is None and exception_checkpoint._args == ()
assert exception_checkpoint._partial_save is False and exception_checkpoint._replicas == 1
assert exception_checkpoint._get_fault_npus() == []
assert exception_checkpoint.check_resumable_model() is False
assert RestoreStrategyGenerator().gen_fault_tolerance_strategy() == ("-1", None)
""")
    assert done.returncode == 0, done.stderr
    assert "torchrun is left as it is" in done.stderr


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            "from mindx_elastic.terminating_message import ExceptionCheckpoint as E; E('a', 'b')",
            "Install mindspore",
        ),
        (
            "import mindx_elastic.torch_exception_module as m\nm.ExceptionHandler().set_config(id)",
            "Install torch",
        ),
    ],
)
def test_what_needs_a_framework_says_which(use, said) -> None:
    done = run(use)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mindx_elastic.errors.MissingFrameworkError")
    assert said in last


def test_importing_it_loads_neither_framework() -> None:
    done = run(
        """
import sys
import mindx_elastic.terminating_message, mindx_elastic.restore_module
import mindx_elastic.torch_exception_module
assert not {"torch", "mindspore", "taskd", "numpy"} & set(sys.modules)
""",
        hidden=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_api_of_elastic_agent_hands_over_to_taskd() -> None:
    done = run(
        "import mindx_elastic.api, sys; assert 'taskd.python.adaptor.patch' in sys.modules\n"
        "assert mindx_elastic.api.patch_torch_methods()",
        hidden=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_is_installed_as_ma_pre_start_does_it(tmp_path) -> None:
    """The document's script, in an environment of its own; the name is that of our wheel."""
    inputs = tmp_path / "inputs" / "data_url_0"
    inputs.mkdir(parents=True)
    copy = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "."], cwd=PACKAGE, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, (one.decode() for one in files)):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((PACKAGE / name).read_bytes())
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", inputs, copy],
        check=True,
    )
    (wheel,) = inputs.glob("*.whl")
    assert wheel.name == f"mindx_elastic-{mindx_elastic.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "mindx_elastic",
            f"mindx_elastic-{mindx_elastic.__version__}.dist-info",
        }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "anaconda"], check=True)
    script = tmp_path / "ma_pre_start.sh"
    script.write_text(f"""
set -e
echo "[ma-pre-start] Enter the input directory"
cd {inputs}/
export PATH={tmp_path}/anaconda/bin:$PATH
pip install ./{wheel.name}
echo "[ma-pre-start] Clean run package"
rm -rf ./script ./*.run ./run_package *.whl
export GLOG_v=2
cd /
python -c "import mindx_elastic; print('version', mindx_elastic.__version__)"
python -c "from mindx_elastic.terminating_message import ExceptionCheckpoint"
""")
    done = subprocess.run(
        ["bash", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1"},  # as in a container without an index
    )
    assert done.returncode == 0, done.stderr
    assert f"version {mindx_elastic.__version__}" in done.stdout
    assert "Successfully installed mindx" in done.stdout
    assert not list(inputs.glob("*.whl"))
