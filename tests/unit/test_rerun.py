"""`python -m taskd.rerun`: a budget, one process at a time, and no signal that gets lost."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 120  # for anything; nothing here takes longer than some starts of an interpreter
# What the commands under test begin with: the number of their start, and a line to wait for.
HEAD = """
import os, signal, sys, time
open("starts", "a").write(f"{os.getpid()}\\n")
start = len(open("starts").readlines())
def ready(): print("ready", os.getpid(), flush=True)
"""
# A signal just before a pause() would have its handler called behind that one.
WAIT = "ready()\nwhile True: time.sleep(0.05)\n"

pytestmark = pytest.mark.slow


class Rerun:
    """A running `python -m taskd.rerun`, in a folder of its own."""

    def __init__(
        self,
        folder: pathlib.Path,
        code: str,
        *options: str,
        ignoring: signal.Signals | None = None,
        shell: str = "",
        **variables: str,
    ) -> None:
        """`shell`: a command of sh with PROGRAM in it, which is started instead of `code`.

        `ignoring`: a signal that it inherits as ignored.
        """
        self.folder = folder
        program = [sys.executable, "-S", "-c", HEAD + code]
        (folder / "program.py").write_text(HEAD + code)
        if shell:
            program = ["sh", "-c", shell.replace("PROGRAM", f"{sys.executable} -S program.py")]
        command = [sys.executable, "-m", "taskd.rerun", *options, "--", *program]
        # Whoever runs the tests may ignore signals himself, as a shell does for what it starts in
        # the background.
        code = "import os, signal, sys\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            handler = "SIG_IGN" if number == ignoring else "SIG_DFL"
            code += f"signal.signal({number:d}, signal.{handler})\n"
        code += "os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-S", "-c", code, *command]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> int:
        """The pid of the next process that waits."""
        assert self.process.stdout is not None
        word, pid = self.process.stdout.readline().split()
        assert word == "ready"
        return int(pid)

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and what it has said."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, [
            line.removeprefix("taskd: ") for line in said.splitlines() if line.startswith("taskd: ")
        ]

    @property
    def starts(self) -> int:
        """How many processes there have been."""
        return len((self.folder / "starts").read_text().splitlines())


def has_ended(pid: int) -> bool:
    """Whether it ends in time. A process that is gone already has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], DEADLINE_S)[0])
    finally:
        os.close(handle)


def test_a_command_that_succeeds_is_started_once(tmp_path) -> None:
    rerun = Rerun(tmp_path, "")
    assert rerun.end() == (0, [])
    assert rerun.starts == 1


def test_a_process_that_is_killed_is_started_again(tmp_path) -> None:
    rerun = Rerun(tmp_path, f"if start == 3: sys.exit(0)\n{WAIT}")
    for _ in range(2):
        os.kill(rerun.ready(), signal.SIGKILL)
    assert rerun.end() == (
        0,
        [
            "the command ended with SIGKILL: restart 1 of 3",
            "the command ended with SIGKILL: restart 2 of 3",
        ],
    )
    assert rerun.starts == 3


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        ("sys.exit(7)", 7, "exit 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("os.abort()", 134, "SIGABRT"),
    ],
)
def test_a_budget_that_is_used_up_ends_with_the_status_of_the_last(
    tmp_path, code, status, how
) -> None:
    rerun = Rerun(tmp_path, code, "--max-restarts=2")
    assert rerun.end() == (
        status,
        [
            f"the command ended with {how}: restart 1 of 2",
            f"the command ended with {how}: restart 2 of 2",
            f"the command ended with {how}; no restart of 2 is left",
        ],
    )
    assert rerun.starts == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_process_which_saves_and_is_not_started_again(
    tmp_path, number
) -> None:
    code = f"signal.signal({number:d}, lambda *_: (open('saved', 'w').close(), os._exit(5)))\n"
    rerun = Rerun(tmp_path, code + WAIT)
    pid = rerun.ready()
    rerun.process.send_signal(number)
    name = number.name
    assert rerun.end() == (
        5,
        [
            f"{name} is handed on to pid {pid}, which has 25 s",
            f"the command ended with exit 5 after {name}: not started again",
        ],
    )
    assert (tmp_path / "saved").exists()
    assert rerun.starts == 1


def test_a_signal_reaches_what_a_shell_has_started(tmp_path) -> None:
    """A shell does not hand signals on, and dies of them before what it has started has saved."""
    code = "signal.signal(15, lambda *_: (open('saved', 'w').close(), os._exit(5)))\n" + WAIT
    rerun = Rerun(tmp_path, code, shell="trap '' TERM; env -i PROGRAM; exit $?")
    rerun.ready()
    rerun.process.send_signal(signal.SIGTERM)
    assert rerun.end()[0] == 5
    assert (tmp_path / "saved").exists()


def test_a_signal_to_the_process_alone_is_a_death_like_any_other(tmp_path) -> None:
    rerun = Rerun(tmp_path, f"if start == 2: sys.exit(0)\n{WAIT}")
    os.kill(rerun.ready(), signal.SIGTERM)
    assert rerun.end() == (0, ["the command ended with SIGTERM: restart 1 of 3"])


def test_who_does_not_end_is_killed_after_the_grace(tmp_path) -> None:
    code = "signal.signal(15, signal.SIG_IGN)\n"
    rerun = Rerun(tmp_path, code + WAIT, TASKD_GRACE_S="0.2")
    pid = rerun.ready()
    rerun.process.send_signal(signal.SIGTERM)
    assert rerun.end() == (
        137,
        [
            f"SIGTERM is handed on to pid {pid}, which has 0.2 s",
            f"pid {pid} has not ended after 0.2 s and is killed",
            "the command ended with SIGKILL after SIGTERM: not started again",
        ],
    )


def test_a_signal_that_comes_as_the_process_dies_is_not_lost(tmp_path) -> None:
    """It is pending when the death is seen, whichever of both is taken first."""
    code = (
        "signal.signal(15, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), 15); os.kill(os.getpid(), signal.SIGKILL)"
    )
    rerun = Rerun(tmp_path, code)
    status, said = rerun.end()
    assert status == 137
    assert said[-1] == "the command ended with SIGKILL after SIGTERM: not started again"
    assert rerun.starts == 1


def test_the_process_dies_with_who_has_started_it(tmp_path) -> None:
    """Else two of them would write to the same checkpoints after the next start."""
    rerun = Rerun(tmp_path, WAIT)
    pid = rerun.ready()
    rerun.process.kill()
    rerun.process.communicate(timeout=DEADLINE_S)
    assert has_ended(pid)


def test_what_a_process_leaves_behind_ends_before_the_next_start(tmp_path) -> None:
    script = (
        f"test -e left || {{ {sys.executable} -S -c 'import signal; signal.pause()' & "
        "echo $! > left; exit 1; }"
    )
    rerun = Rerun(tmp_path, "", shell=script)
    assert rerun.end() == (0, ["the command ended with exit 1: restart 1 of 3"])
    assert has_ended(int((tmp_path / "left").read_text()))


def test_the_process_has_the_signals_as_they_were(tmp_path) -> None:
    """Nothing blocked; what nohup has had ignored stays ignored, and ends nobody."""
    code = (
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
        "open('seen', 'w').write(f'{len(blocked)} {ignored}')\n" + WAIT
    )
    rerun = Rerun(tmp_path, code, ignoring=signal.SIGHUP)
    pid = rerun.ready()
    rerun.process.send_signal(signal.SIGHUP)
    rerun.process.send_signal(signal.SIGTERM)
    assert rerun.end() == (
        143,
        [
            f"SIGTERM is handed on to pid {pid}, which has 25 s",
            "the command ended with SIGTERM after SIGTERM: not started again",
        ],
    )
    assert (tmp_path / "seen").read_text() == "0 True"


def test_ends_are_seen_where_the_parent_has_ignored_them(tmp_path) -> None:
    rerun = Rerun(tmp_path, "sys.exit(0 if start == 2 else 1)", ignoring=signal.SIGCHLD)
    assert rerun.end() == (0, ["the command ended with exit 1: restart 1 of 3"])


@pytest.mark.parametrize(
    ("arguments", "grace", "said"),
    [
        ("true", "", "unrecognized arguments: true"),
        ("", "", "no command: write it behind --"),
        ("--", "", "no command: write it behind --"),
        ("--max-restarts=-1 -- true", "", "--max-restarts -1: 0 or more is needed"),
        ("--max-restarts=x -- true", "", "invalid int value: 'x'"),
        ("-- /no/such/program", "", "/no/such/program cannot be started: No such file"),
        ("-- true", "soon", "TASKD_GRACE_S='soon' is not accepted"),
    ],
)
def test_what_cannot_be_started_is_said_and_ends_with_2(tmp_path, arguments, grace, said) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taskd.rerun", *arguments.split()],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TASKD_GRACE_S": grace},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_it_loads_neither_torch_nor_zmq() -> None:
    code = "import sys, taskd.rerun; print(sorted({'torch', 'zmq', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
