"""`python -m taskd.dump` and `taskd dump`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from checkpoints import draft_of, save, tree

from taskd import dump
from taskd.checkpoint.names import Kind


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = dump.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_ls_tells_each_in_a_line_newest_first(tmp_path, capsys) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20, kind=Kind.DUMP, world_size=4, fault="rank 1: SIGKILL\x1b[2J\n")
    torn = save(tmp_path, 30)
    (torn / "__0_0.distcp").unlink()
    draft_of(tmp_path, 40).join(0)
    was = tree(tmp_path)
    code, out, err = run(capsys, "ls", tmp_path)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == [
        "dump-000000000020",
        "step-000000000010",
        draft_of(tmp_path, 40).path.name,
        "step-000000000030",
    ]
    assert "dump  step 20  world 4" in lines[0]
    assert "UTC  job job  rank 1: SIGKILL?[2J?  ok" in lines[0]
    assert lines[2].endswith("NOT WHOLE  was not finished")
    assert lines[3].endswith("NOT WHOLE  __0_0.distcp: is missing")
    assert tree(tmp_path) == was


def test_ls_of_nothing(tmp_path, capsys) -> None:
    code, out, err = run(capsys, "ls", tmp_path)
    assert (code, out, err) == (0, "", f"{tmp_path}: no checkpoints\n")
    code, _, err = run(capsys, "ls", tmp_path / "missing")
    assert (code, err) == (1, f"{tmp_path}/missing: is missing\n")
    (tmp_path / "file").touch()
    assert run(capsys, "ls", tmp_path / "file")[::2] == (1, f"{tmp_path}/file: is no folder\n")


def test_show_tells_what_is_in_it(tmp_path, capsys) -> None:
    path = save(
        tmp_path,
        20,
        kind=Kind.DUMP,
        world_size=4,
        writers=(0, 3),
        fault="rank 1: SIGKILL",
        states=("model", "ema"),
    )
    code, out, _ = run(capsys, "show", path)
    assert code == 0
    fields = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
    assert {name: value.strip() for name, value in fields.items()}.items() >= {
        "kind": "dump",
        "job": "job",
        "step": "20",
        "fault": "rank 1: SIGKILL",
        "world": "4",
        "written by ranks": "0 3",
        "states": "model, ema",
    }.items()
    assert "weight  [300, 17]  float32" in out
    assert "bias  [17]  bfloat16" in out
    assert "steps  []  int64" in out
    assert "ranks/3/random  (value)" in out
    code, _, err = run(capsys, "show", tmp_path / "missing")
    assert (code, err) == (1, f"{tmp_path}/missing: is missing\n")


def test_show_of_a_directory_of_checkpoints_says_what_lists_them(tmp_path, capsys) -> None:
    said = f"{tmp_path}: is a directory of checkpoints: taskd dump ls {tmp_path} lists them\n"
    draft_of(tmp_path, 40).join(0)
    assert run(capsys, "show", tmp_path) == (1, "", said)
    save(tmp_path, 10)
    assert run(capsys, "show", tmp_path) == (1, "", said)
    (tmp_path / "other").mkdir()
    assert run(capsys, "show", tmp_path / "other")[2].endswith("other/taskd.json: is missing\n")


def test_verify_names_every_bad_file_and_why(tmp_path, capsys) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 20, writers=(0, 1, 2))
    assert run(capsys, "verify", tmp_path) == (0, f"{bad}: ok\n{good}: ok\n", "")
    data = bytearray((bad / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (bad / "__0_0.distcp").write_bytes(data)
    (bad / "__1_0.distcp").unlink()
    os.truncate(bad / "__2_0.distcp", 3)
    for target in (bad, tmp_path):
        code, out, _ = run(capsys, "verify", target)
        assert code == 1
        assert f"{bad}/__0_0.distcp: its content has changed since it was written" in out
        assert f"{bad}/__1_0.distcp: is missing" in out
        assert f"{bad}/__2_0.distcp: has 3 bytes" in out
        assert (f"{good}: ok" in out) == (target == tmp_path)
    assert run(capsys, "verify", good) == (0, f"{good}: ok\n", "")
    (good / "taskd.json").write_text("{}")
    code, out, _ = run(capsys, "verify", good)
    assert (code, out) == (
        1,
        f"{good}/taskd.json: has format None; this version of taskd reads format 1\n",
    )
    assert run(capsys, "verify", tmp_path / "missing")[0] == 1
    (tmp_path / "empty").mkdir()
    assert run(capsys, "verify", tmp_path / "empty") == (
        1,
        "",
        f"{tmp_path}/empty: no checkpoints\n",
    )


def test_wrong_usage_is_told_apart(capsys) -> None:
    for arguments in (["frobnicate"], ["ls"], []):
        with pytest.raises(SystemExit) as ended:
            dump.main(arguments)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        dump.console(["frobnicate"])
    assert ended.value.code == 2


def test_the_command_of_the_package_is_the_same(tmp_path, capsys) -> None:
    path = save(tmp_path, 10)
    assert dump.console(["dump", "verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"


def test_ls_needs_no_torch(tmp_path) -> None:
    save(tmp_path, 10)
    code = (
        f"import sys; from taskd.dump import main; main(['ls', {str(tmp_path)!r}]); "
        "print('torch' in sys.modules)"
    )
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
