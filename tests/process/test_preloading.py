"""Replacements start with what the first worker had imported: without a variable, and rightly.

Modules tell who has run their code: the preloaded process, the forkserver, or a worker itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow
DEADLINE_S = 240.0  # trials have a niceness: where there is much else to do, they take long
PRELOADED, FORKSERVER, STANDBY = "taskd-preloaded", "taskd-forkserve", "taskd-standby"
WHO = 'WHO = open("/proc/self/comm").read().strip()\n'
IF_TRIED = f'if WHO == "{PRELOADED}":\n    '
# What a module does at its import, and why it is left out.
ODD = {
    "starts_a_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "starts 1 thread",
    ),
    "reads_rank": ("import os\nRANK = os.environ.get('RANK')\n", "reads RANK"),
    "copies_environment": ("import os\nALL = dict(os.environ)\n", "reads the whole environment"),
    "opens_a_socket": ("import socket\nSOCKET = socket.socket()\n", "opens a socket"),
    "opens_a_device": ("FILE = open('/dev/full')\n", "opens /dev/full"),
    "handles_a_signal": (
        "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n",
        "changes signal handlers",
    ),
    "sets_a_variable": (
        "import os\nos.environ['SET_AT_IMPORT'] = '1'\n",
        "changes the environment",
    ),
    "starts_a_process": (
        "import subprocess\nPROCESS = subprocess.Popen(['sleep', '600'])\n",
        "starts a process",
    ),
    "draws": ("import random\nVALUE = random.random()\n", "draws random numbers"),
    "draws_torch": ("import torch\nVALUE = torch.rand(1)\n", "draws random numbers"),
    "own_generator": (
        "import numpy\nGENERATOR = numpy.random.default_rng()\n",
        "draws random bytes",
    ),
    "makes_an_id": ("import uuid\nID = uuid.uuid4()\n", "draws random bytes"),
    "imports_own": ("import beside_importing\n", "imports beside_importing of the script's own"),
}
BROKEN = {
    "crashes": (f"import os\n{IF_TRIED}os.abort()\n", "ends its process (SIGABRT)"),
    "hangs": (f"import time\n{IF_TRIED}time.sleep(600)\n", "takes more than 20 s"),
}
# As the binding of triton, by nanobind, which counts what an interpreter has not freed at its end.
# This object is in a circle: collections alone free it, and they leave what is frozen alone.
COUNTED = """
import os, sys
class Counted:
    __module__ = "nanobind"
    def __init__(self):
        self.itself = self
    def __del__(self, write=os.write, getpid=os.getpid):
        write(1, b"freed in %d\\n" % getpid())
OBJECT = Counted()
sys.modules["triton._C.libtriton"] = sys.modules[__name__]
"""
# Each odd one is followed by another good one: what comes later is preloaded all the same.
GOOD = ("good", "good.part", "good_too")
# sitecustomize: where a test wants to wait less long for what hangs, and long enough for what is
# good and gets no processor for some seconds
SHORT = "import taskd.agent.spawning.preloading as preloading\npreloading.TRIAL_S = 20.0\n"


@pytest.fixture
def library(tmp_path: pathlib.Path) -> pathlib.Path:
    """Modules outside the script's folder."""
    folder = tmp_path / "library"
    (folder / "good").mkdir(parents=True)
    (folder / "good" / "__init__.py").write_text(WHO)
    (folder / "good" / "part.py").write_text(WHO)
    (folder / "good_too.py").write_text(WHO)
    (folder / "odd_package").mkdir()
    (folder / "odd_package" / "__init__.py").write_text(f"{WHO}import reads_rank\n")
    (folder / "odd_package" / "part.py").write_text(WHO)
    for name, (source, _) in {**ODD, **BROKEN}.items():
        (folder / f"{name}.py").write_text(WHO + source)
    return folder


def started(
    job: harness.Job, library: pathlib.Path, *imports: str, nproc: int = 2, **env: str
) -> harness.Output:
    job.start_manager()
    paths = os.pathsep.join([str(library), job.env["PYTHONPATH"]])
    return job.start_agent(
        "importing.py", nproc=nproc, warm=False, PYTHONPATH=paths, IMPORTS=",".join(imports), **env
    )


def await_facts(job: harness.Job, what: str, count: int) -> list[dict]:
    deadline = time.monotonic() + DEADLINE_S
    while len(facts := job.facts(what)) < count:
        assert time.monotonic() < deadline, job.story()
        time.sleep(0.02)
    return facts


def kill_rank(job: harness.Job, rank: int) -> None:
    (pid,) = {fact["pid"] for fact in job.facts("imported") if fact["rank"] == rank}
    os.kill(pid, signal.SIGKILL)


def end_well(job: harness.Job, agent: harness.Output) -> str:
    (job.facts_dir / "go").touch()
    finished = agent.wait(DEADLINE_S)
    assert finished.returncode == 0, finished.output[-6000:]
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0
    assert job.leftovers() == set()
    return finished.output


def named(job: harness.Job, name: str) -> set[int]:
    """Processes of the job with this name."""
    found = set()
    for pid in job.leftovers():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == name:
                found.add(pid)
    return found


def settled(job: harness.Job, agent: harness.Output) -> tuple[int, set[int]]:
    """The preloaded process, and those that it has forked beforehand."""
    agent.wait_text("are preloaded", DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while len(standbys := named(job, STANDBY)) < 2 or len(found := named(job, PRELOADED)) > 1:
        assert time.monotonic() < deadline, job.story()
        time.sleep(0.02)
    (pid,) = found
    return pid, standbys


def after_a_kill(job: harness.Job, agent: harness.Output) -> tuple[list[dict], str]:
    """Rank 1 is killed, and all goes well: what the processes tell, the first two first; output."""
    kill_rank(job, 1)
    facts = await_facts(job, "imported", 4)
    return facts, end_well(job, agent)


def preloaded_in(fact: dict) -> set[str]:
    """The modules that this process found imported by the preloaded one."""
    return {name for name, who in fact["who"].items() if who == PRELOADED}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path
) -> Callable[[pathlib.Path], dict[int, str]]:
    """Digests of a training without taskd."""

    def digests(library: pathlib.Path) -> dict[int, str]:
        def train() -> dict[str, str]:
            folder = tmp_path_factory.mktemp("undisturbed")
            (folder / "go").touch()
            harness.run_plainly(
                folder,
                str(harness.SCRIPTS / "importing.py"),
                nproc=2,
                FACTS=str(folder),
                IMPORTS="good,draws,draws_torch,good_too",
                PYTHONPATH=os.pathsep.join([str(library), str(harness.ROOT)]),
            )
            return {f["rank"]: f["digest"] for f in harness.facts_in(folder) if "digest" in f}

        found = harness.once(shared_folder, "importing", train)
        return {int(rank): digest for rank, digest in found.items()}

    return digests


@pytest.mark.parametrize("recoverable", ["0", "1"])
def test_replacements_start_with_the_modules_of_the_first_worker_and_the_same_result(
    tmp_path: pathlib.Path,
    library: pathlib.Path,
    undisturbed: Callable[[pathlib.Path], dict[int, str]],
    recoverable: str,
) -> None:
    imports = ("good", "draws", "draws_torch", "good_too")
    with harness.job(tmp_path, RECOVERABLE=recoverable) as job:
        agent = started(job, library, *imports)
        agent.wait_text("are preloaded", DEADLINE_S)
        kill_rank(job, 1)
        count = 3 if recoverable == "1" else 4  # one is replaced, or both
        facts = await_facts(job, "imported", count)
        end_well(job, agent)
        assert len(job.recoveries()) == 1
        assert job.digests() == undisturbed(library)
    for fact in facts[:2]:
        assert set(fact["who"].values()).isdisjoint({PRELOADED, FORKSERVER})
    for fact in facts[2:]:
        assert preloaded_in(fact) == {"good", "good_too"}


def test_what_must_not_be_preloaded_is_left_out_with_the_reason_in_the_log(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, GOOD[0], *ODD, "odd_package.part", *GOOD[1:])
        agent.wait_text("are preloaded", DEADLINE_S)
        facts, output = after_a_kill(job, agent)
    for name, (_, reason) in ODD.items():
        assert f"{name} {reason}" in output
    assert "odd_package reads RANK" in output
    assert "odd_package.part" not in output  # its package is imported first
    for fact in facts[2:]:
        assert preloaded_in(fact) == set(GOOD)


def test_a_rank_in_the_environment_of_torchrun_itself_hides_nobody_who_reads_his(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    """A pod of Kubernetes has RANK, as rank 0 has it, which may be the one that is asked."""
    with harness.job(tmp_path) as job:
        agent = started(job, library, "reads_rank", *GOOD, nproc=1, RANK="0")
        agent.wait_text("are preloaded", DEADLINE_S)
        assert "reads_rank reads RANK" in end_well(job, agent)


@pytest.mark.parametrize("name", BROKEN)
def test_an_import_that_crashes_or_hangs_costs_the_warm_start_of_what_follows_alone(
    tmp_path: pathlib.Path, library: pathlib.Path, name: str
) -> None:
    (library / "sitecustomize.py").write_text(SHORT)
    with harness.job(tmp_path) as job:
        agent = started(job, library, "good", name, "good_too")
        agent.wait_text("are preloaded", DEADLINE_S)
        facts, output = after_a_kill(job, agent)
    assert f"{name} {BROKEN[name][1]}" in output
    for fact in facts[2:]:
        assert preloaded_in(fact) == {"good"}


def test_nothing_is_preloaded_behind_what_changes_torch_and_is_left_out(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    (library / "changes_torch.py").write_text(
        f"{WHO}import os, torch\nRANK = os.environ.get('RANK')\n"
        "torch.nn.functional.relu = torch.nn.functional.gelu\n"
    )
    with harness.job(tmp_path) as job:
        agent = started(job, library, "good", "changes_torch", "good_too")
        agent.wait_text("are preloaded", DEADLINE_S)
        facts, output = after_a_kill(job, agent)
    assert "changes_torch reads RANK and changes torch" in output
    for fact in facts[2:]:
        assert preloaded_in(fact) == {"good"}


def test_replacements_were_forked_beforehand_and_others_are_for_the_next_fault(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        _, first = settled(job, agent)
        kill_rank(job, 1)
        facts = await_facts(job, "imported", 4)
        assert {fact["pid"] for fact in facts[2:]} == first
        _, second = settled(job, agent)
        os.kill(facts[2]["pid"], signal.SIGKILL)
        facts = await_facts(job, "imported", 6)
        assert {fact["pid"] for fact in facts[4:]} == second
        end_well(job, agent)


def test_a_worker_does_not_copy_what_it_shares_before_its_script_begins(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    """A look at all names of all modules, in each process by itself, was a fifth of a recovery."""
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        settled(job, agent)
        facts, _ = after_a_kill(job, agent)
    for fact in facts:
        assert fact["faults_before"] < fact["faults_of_a_look"] / 2, facts


def test_a_process_that_was_forked_beforehand_may_be_killed(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        _, standbys = settled(job, agent)
        for pid in standbys:
            os.kill(pid, signal.SIGKILL)
        facts, _ = after_a_kill(job, agent)
    for fact in facts[2:]:
        assert preloaded_in(fact) == set(GOOD)


def test_a_preloaded_process_that_dies_costs_the_warm_start_alone(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        pid, _ = settled(job, agent)
        os.kill(pid, signal.SIGKILL)
        agent.wait_text("the preloaded process has ended (SIGKILL)", DEADLINE_S)
        facts, _ = after_a_kill(job, agent)
    assert not any(PRELOADED in fact["who"].values() for fact in facts)


def test_a_preloaded_process_that_hangs_is_not_waited_for(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        pid, _ = settled(job, agent)
        os.kill(pid, signal.SIGSTOP)
        facts, output = after_a_kill(job, agent)
    assert "the preloaded process has not answered for 3 s" in output
    assert not any(PRELOADED in fact["who"].values() for fact in facts)


def test_workers_of_the_preloaded_process_outlive_it_and_their_ends_are_told(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    with harness.job(tmp_path) as job:
        agent = started(job, library, *GOOD)
        pid, _ = settled(job, agent)
        kill_rank(job, 1)
        facts = await_facts(job, "imported", 4)
        os.kill(pid, signal.SIGKILL)
        agent.wait_text("the preloaded process has ended (SIGKILL)", DEADLINE_S)
        os.kill(facts[2]["pid"], signal.SIGSEGV)
        await_facts(job, "imported", 6)
        end_well(job, agent)
        assert [r["faults"][0]["detail"].split()[0] for r in job.recoveries()] == [
            "SIGKILL",
            "SIGSEGV",
        ]


@pytest.mark.parametrize(("preload", "who"), [("auto", PRELOADED), ("counted", FORKSERVER)])
def test_what_is_counted_at_the_end_is_freed_whoever_has_imported_it(
    tmp_path: pathlib.Path, library: pathlib.Path, preload: str, who: str
) -> None:
    (library / "counted.py").write_text(WHO + COUNTED)
    with harness.job(tmp_path, TASKD_PRELOAD=preload) as job:
        agent = started(job, library, "counted")
        if who == PRELOADED:
            settled(job, agent)
        else:
            await_facts(job, "imported", 2)
        facts, output = after_a_kill(job, agent)
    for fact in facts[2:]:
        assert fact["who"]["counted"] == who
        assert f"freed in {fact['pid']}\n" in output


@pytest.mark.parametrize(("preload", "expected"), [("off", set()), ("good", {"good"})])
def test_a_list_is_exact_and_off_is_off(
    tmp_path: pathlib.Path, library: pathlib.Path, preload: str, expected: set[str]
) -> None:
    with harness.job(tmp_path, TASKD_PRELOAD=preload) as job:
        agent = started(job, library, *GOOD)
        await_facts(job, "imported", 2)
        kill_rank(job, 1)
        facts = await_facts(job, "imported", 4)
        end_well(job, agent)
    for fact in facts:
        assert not fact["asked"]
        by_forkserver = {name for name, who in fact["who"].items() if who == FORKSERVER}
        assert by_forkserver == expected
