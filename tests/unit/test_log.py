"""Log set-up.

Prefix, levels, one line per record, a file that is ours alone, and what happens when it cannot be
written.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd import log as log_module
from taskd.config import LogConfig
from taskd.torchrun import loop
from testbed.proc import open_files

if TYPE_CHECKING:
    import pathlib


@pytest.fixture(autouse=True)
def clean():
    yield
    for handler in list(log_module.log.handlers):
        log_module.log.removeHandler(handler)
        handler.close()
    log_module.log.propagate = True
    log_module.log.setLevel(logging.NOTSET)


def test_lines_carry_job_generation_and_role_and_go_to_both_places(
    tmp_path: pathlib.Path, capsys
) -> None:
    identity = log_module.setup(
        LogConfig(tmp_path / "log", "DEBUG", "WARNING"), job_id="job", role="agent 3"
    )
    identity.generation = 7
    logging.getLogger("taskd.some.module").debug("quiet")
    logging.getLogger("taskd.some.module").warning("loud")
    shown = capsys.readouterr().err
    assert "WARNING taskd job/7 agent 3 loud" in shown
    assert "quiet" not in shown
    path = tmp_path / "log" / "agent-3.log"
    assert "DEBUG taskd job/7 agent 3 quiet" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) & ~0o640 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) & ~0o750 == 0


def test_a_text_from_outside_cannot_forge_a_line(tmp_path: pathlib.Path, capsys) -> None:
    log_module.setup(LogConfig(tmp_path), job_id="job", role="x")
    logging.getLogger("taskd").warning("a\n2026 INFO taskd job/0 x \x1b[31mforged")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "a\\n2026" in shown
    assert "\x1b" not in shown


def test_nor_can_it_forge_the_last_line_of_torchrun(capsys, monkeypatch) -> None:
    last: list[str] = []
    monkeypatch.setattr(atexit, "register", lambda _, line: last.append(line))
    reason = "rank 1 raised ValueError: \x1b[31m\0\na second line"
    loop._say_at_the_end("job", reason)
    assert last == [
        "taskd: job job has ended: rank 1 raised ValueError: \\x1b[31m\\x00\\na second line\n"
    ]


def test_output_can_be_switched_off(tmp_path: pathlib.Path, capsys) -> None:
    log_module.setup(LogConfig(tmp_path, to_std=False), job_id="job", role="x")
    logging.getLogger("taskd").error("to the file only")
    assert capsys.readouterr().err == ""
    assert "to the file only" in (tmp_path / "x.log").read_text()


@pytest.mark.parametrize("obstacle", ["file", "link", "linked file"])
def test_a_log_that_cannot_be_written_costs_one_line(
    tmp_path: pathlib.Path, capsys, obstacle: str
) -> None:
    directory = tmp_path / "log"
    if obstacle == "file":
        directory.write_text("")
    elif obstacle == "link":
        directory.symlink_to(tmp_path)
    else:
        directory.mkdir()
        (directory / "x.log").symlink_to(tmp_path / "elsewhere")
    log_module.setup(LogConfig(directory), job_id="job", role="x")
    logging.getLogger("taskd").warning("goes on")
    shown = capsys.readouterr().err
    assert shown.count("no log file will be written") == 1
    assert "goes on" in shown
    assert not (tmp_path / "elsewhere").exists()


def test_without_any_place_to_write_nothing_breaks(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / "log").write_text("")
    log_module.setup(LogConfig(tmp_path / "log", to_std=False), job_id="job", role="x")
    logging.getLogger("taskd").error("nobody hears")
    assert capsys.readouterr().err == ""


def test_a_second_set_up_replaces_the_first(tmp_path: pathlib.Path) -> None:
    for _ in range(5):
        log_module.setup(LogConfig(tmp_path), job_id="job", role="x")
    assert len(open_files(str(tmp_path))) == 1
    assert len(log_module.log.handlers) == 2


def test_a_thing_is_said_once_and_the_memory_of_it_is_bounded() -> None:
    once = log_module.SayOnce(capacity=2)
    assert [once.is_new("a"), once.is_new("a"), once.is_new("b", 1), once.is_new("c")] == [
        True,
        False,
        True,
        False,
    ]


SAYS = "from taskd import streams; streams.tell('a line\\n'); streams.flush(); print('there')"


@pytest.mark.parametrize("how", ["closed", "unread", "by the script"])
def test_a_line_for_nobody_is_no_error(how: str) -> None:
    """Stderr is closed from the start, its reader is gone, or the script has closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    shell = 'exec "$0" -c "$1"' + (" 2>&-" if how == "closed" else "")
    before = "import sys; sys.stderr.close(); " if how == "by the script" else ""
    command = ["sh", "-c", shell, sys.executable, before + SAYS]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False, timeout=60)
    os.close(writer)
    assert done.stdout == b"there\n"


def test_the_last_line_of_a_job_leaves_the_exit_code_alone() -> None:
    """With `2>&-` there is no stderr at all."""
    program = (
        "from taskd.torchrun.loop import EXIT_DUMPED, _say_at_the_end\n"
        "_say_at_the_end('job', 'it was saved')\n"
        "raise SystemExit(EXIT_DUMPED)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    assert subprocess.run(command, check=False, timeout=60).returncode == 2


def test_a_variable_that_is_misspelt_is_named_with_the_one_that_was_meant(caplog) -> None:
    log_module.warn_of_misspelt([("TASKD_PROT", "TASKD_PORT")])
    assert caplog.messages == [
        "the variable TASKD_PROT is read by nobody: did you mean TASKD_PORT?"
    ]


# ------------------------------------------------------------------ in a training process

# What a training script does about logging, and the lines that a WARNING of TaskD makes of it.
_SCRIPTS = {
    "nothing": ("", r"\d\d:\d\d:\d\d WARNING taskd: a loss of 7\n"),
    "before": ("logging.basicConfig()", "WARNING:taskd.part:a loss of 7\n"),
    "on taskd": (
        "logging.getLogger('taskd').addHandler(logging.StreamHandler())",
        "a loss of 7\n",
    ),
    "on a part": (
        "logging.getLogger('taskd.part').addHandler(logging.StreamHandler())",
        "a loss of 7\n",
    ),
    "silent": ("logging.getLogger('taskd').addHandler(logging.NullHandler())", ""),
    "no last resort": ("logging.lastResort = None", ""),
    "errors only": ("logging.getLogger('taskd').setLevel('ERROR')", ""),
    "apart": (
        "logging.basicConfig(); logging.getLogger('taskd').propagate = False",
        r"\d\d:\d\d:\d\d WARNING taskd: a loss of 7\n",
    ),
}


def _printed(*lines: str) -> str:
    """What a process prints to stderr that runs these."""
    source = "\n".join(("import logging", "from taskd import log", *lines))
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("does", _SCRIPTS)
def test_a_warning_in_a_training_process_is_printed_once_and_says_what_it_is(does, order) -> None:
    script, expected = _SCRIPTS[does]
    ours = "log.stand_in(); log.stand_in()"
    printed = _printed(
        *((ours, script) if order == "first" else (script, ours)),
        "part = logging.getLogger('taskd.part')",
        "part.info('nothing to see')",
        "part.warning('a loss of %d', 7)",
    )
    assert re.fullmatch(expected, printed), printed


def test_a_script_that_configures_logging_later_gets_the_lines_from_then_on() -> None:
    printed = _printed(
        "log.stand_in()",
        "part = logging.getLogger('taskd.part')",
        "part.warning('one\\ntwo')",
        "logging.basicConfig(format='own %(message)s')",
        "part.warning('three')",
    )
    assert re.fullmatch(r"\S+ WARNING taskd: one\\ntwo\nown three\n", printed)


def test_a_line_whose_arguments_do_not_fit_costs_no_exception() -> None:
    printed = _printed("log.stand_in()", "logging.getLogger('taskd').warning('%d', 'x')")
    assert "--- Logging error ---" in printed
