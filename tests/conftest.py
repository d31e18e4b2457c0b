"""What holds for all tests: gloo stays on loopback; what several test processes share.

Which tests run when; and random histories have a seed that everybody can read.
"""

import gc
import os
import pathlib
import secrets
import signal
import sys

import hypothesis
import pytest

from tests import lanes

# Otherwise gloo looks up the host's name for each group; where no resolver answers, that takes 10 s
# each time.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

# A process that a test forks does not collect what earlier tests have left in cycles: a process
# group waits there for threads that only its first process has.
os.register_at_fork(after_in_child=gc.freeze)

# Until the tests are collected (see pytest_collection_finish): nearly all that imports make stays,
# and would be looked at again and again.
gc.disable()

# In the background of a script they are ignored, and would be in all that tests start.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# Examples have no limit of time: a busy machine is no reason to fail. CI runs the same ones each
# time; HYPOTHESIS_PROFILE=fresh looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None, max_examples=2000)
# For tests/mutants.py: the same few examples each time, and no search for a smaller one that fails.
hypothesis.settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local")
)

# Fresh in each run. The processes of xdist inherit it.
SEED = os.environ.setdefault("TASKD_TEST_SEED", str(secrets.randbits(32)))


@pytest.fixture(scope="session")
def shared_folder(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> pathlib.Path:
    """A folder of this run of the tests, the same for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `.ci/run` asks for."""
    parser.addoption(
        "--slice", metavar="SEED", help="of the extended tests, run some that this text chooses"
    )
    parser.addoption(
        "--slice-seconds",
        metavar="S",
        type=float,
        default=240.0,
        help="start no further test of the slice after S seconds",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The parts of this file that are plugins of their own.

    Raises UsageError if groups would be lost: pytest-xdist 3.8 writes them where pytest 9.2 does
    not look, and then each process makes the fixtures of all groups.
    """
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            "this pytest-xdist and this pytest keep no groups together: "
            "install pytest<9.2, as the Makefile does"
        )
    if config.getoption("--slice") is not None:
        config.pluginmanager.register(
            lanes.Slice(config.getoption("--slice"), config.getoption("--slice-seconds")), "slice"
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-all`, and keep together what shares processes."""
    try:
        _mark(config, items)
    except pytest.UsageError as error:
        if hasattr(config, "workeroutput"):
            config.workeroutput["refusal"] = str(error)
        raise


def _mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    unused = lanes.mark(items)
    if unused and config.args == ["tests"]:
        raise pytest.UsageError(
            f"no test is called {', '.join(sorted(unused))}: see tests/extended"
        )
    unproved = lanes.unproved(items) if config.args == ["tests"] else set()
    if unproved:
        raise pytest.UsageError(
            f"`make test` has no {', '.join(sorted(unproved))}: see tests/promises.py"
        )


def pytest_collection_finish() -> None:
    """Let the collector of garbage look only at what the tests make from now on."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """What a process of pytest-xdist has refused; it says that it has crashed, and not why.

    Raises UsageError.
    """
    refusal = getattr(node, "workeroutput", {}).get("refusal")
    if refusal is not None:
        raise pytest.UsageError(refusal)


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may draw
def pytest_runtest_setup() -> None:
    """Torch's generator begins anew in each test, as pytest-randomly has Python's and numpy's."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(
        f"random histories: TASKD_TEST_SEED={SEED} plays the same ones again"
    )
