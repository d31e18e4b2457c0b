"""Every file in examples/ runs.

The training scripts: under plain torchrun, and under taskd with one rank killed; equal results.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from taskd.checkpoint import folder
from tests.process import harness

pytestmark = pytest.mark.slow

EXAMPLES = harness.ROOT / "examples"
KILL_ONCE = pathlib.Path(__file__).parent / "kill_once.py"
NOWHERE = ("-", 0)
MARKED = re.compile(r"# \+ \d(?:  (.*))?$")


# What is looked for is not looked for by lines: print() writes a line's end on its own, and ranks
# and agent share the output.


def finals(text: str) -> list[str]:
    """What rank 0 of an example says at its end."""
    return re.findall(r"final: digest [0-9a-f]{16}(?: loss \d+\.\d{6})?", text)


def weights(text: str, where: str = "") -> list[str]:
    """What the ranks told of their weights, at the end or as they began something."""
    return sorted(
        re.findall(
            rf"rank \d: {where and where + ' begins with '}weights "
            rf"[0-9a-f]{{16}}",
            text,
        )
    )


def run_plainly(directory: pathlib.Path, script: pathlib.Path, *arguments: str) -> str:
    """Two processes without taskd; nobody is killed."""
    return harness.run_plainly(
        directory,
        str(KILL_ONCE),
        str(directory / "no-marker"),
        "-1",
        "-",
        "0",
        str(script),
        *arguments,
        nproc=2,
    )


def run_under_torchrun(directory: pathlib.Path, script: pathlib.Path, *arguments: str) -> str:
    """The same under plain torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(KILL_ONCE),
        str(directory / "no-marker"),
        "-1",
        "-",
        "0",
        str(script),
        *arguments,
    ]
    plain = harness.Output(command, harness.environment(), directory / "plain.out", directory)
    try:
        finished = plain.wait(120)
    finally:
        plain.end()
    assert finished.returncode == 0, finished.output[-6000:]
    return finished.output


def start(
    job: harness.Job,
    script: pathlib.Path,
    *arguments: str,
    rank: int,
    at: tuple[str, int],
    nproc: int = 2,
) -> harness.Finished:
    """taskd's torchrun. One rank is killed there, unless one has been or `at` is NOWHERE."""
    job.start_manager()
    agent = job.start_agent(
        str(KILL_ONCE),
        str(job.facts_dir / "killed"),
        str(rank),
        at[0],
        str(at[1]),
        str(script),
        *arguments,
        nproc=nproc,
    )
    finished = agent.wait(120)
    assert (job.facts_dir / "killed").exists() == (at != NOWHERE)
    return finished


def ended_well(job: harness.Job, finished: harness.Finished) -> None:
    assert finished.returncode == 0, finished.output[-6000:]
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0, job.manager.text
    assert job.leftovers() == set()


def run_and_kill(
    job: harness.Job,
    script: pathlib.Path,
    *arguments: str,
    rank: int,
    at: tuple[str, int],
    nproc: int = 2,
) -> str:
    """A run that loses a rank and recovers. Returns what it printed."""
    finished = start(job, script, *arguments, rank=rank, at=at, nproc=nproc)
    ended_well(job, finished)
    assert len(job.recoveries()) == (at != NOWHERE)
    return finished.output


@pytest.mark.parametrize("rank", [0, 1])
def test_the_char_gpt_loses_a_rank_and_ends_with_the_same_digest(
    tmp_path: pathlib.Path, char_gpt: str, rank: int
) -> None:
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(
            job, EXAMPLES / "char_gpt.py", "--steps", "6", rank=rank, at=("optimizer", 4)
        )
        assert job.recoveries()[0]["strategy"] == "recover-in-place"
    assert finals(hurt) == [char_gpt]


def test_the_minimal_script_loses_a_rank_and_ends_with_the_same_weights(
    tmp_path: pathlib.Path,
) -> None:
    script = EXAMPLES / "minimal_ddp.py"
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, rank=1, at=("optimizer", 50))
        assert job.recoveries()[0]["strategy"] == "recover-in-place"
    assert len(weights(hurt)) == 2
    assert weights(hurt) == weights(run_under_torchrun(tmp_path, script))


def test_the_minimal_script_without_its_six_lines_is_a_plain_one(tmp_path: pathlib.Path) -> None:
    with_taskd = (EXAMPLES / "minimal_ddp.py").read_text()
    plain, marks = [], 0
    for line in with_taskd.splitlines():
        found = MARKED.search(line)
        marks += found is not None
        if found is None:
            plain.append(line)
        elif found[1]:  # a changed line: its comment is the plain one
            plain.append(" " * (len(line) - len(line.lstrip())) + found[1])
    assert marks == 6
    code = "\n".join(plain).partition('"""\n')[2]
    assert "taskd" not in code
    assert "state" not in code
    script = tmp_path / "plain.py"
    script.write_text(code)
    expected = weights(run_plainly(tmp_path, EXAMPLES / "minimal_ddp.py"))
    assert len(expected) == 2
    assert weights(run_plainly(tmp_path, script)) == expected


def test_the_unmodified_script_loses_a_rank_and_resumes_from_its_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    script = EXAMPLES / "unmodified.py"
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, str(tmp_path / "hurt.pt"), rank=0, at=("optimizer", 15))
        assert job.recoveries()[0]["strategy"] == "restart"
    assert "starts at step 10" in hurt
    plain = run_plainly(tmp_path, script, str(tmp_path / "plain.pt"))
    assert weights(hurt) == weights(plain) != []


def test_a_shard_that_only_the_dead_had_comes_from_the_newest_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    script, arguments = EXAMPLES / "fsdp2_char_gpt.py", ("--steps", "6", "--checkpoint-every", "2")
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, *arguments, rank=1, at=("optimizer", 6), nproc=4)
        (record,) = job.recoveries()
        assert record["strategy"] == "restart"
    # Back from step 5. The checkpoint of step 2 was on the disk before that of step 4 was begun;
    # whether that one was complete at the kill is open.
    (version,) = {
        int(found)
        for found in re.findall(
            r"starts at step \d+: read version (\d+) "
            r"from ",
            hurt,
        )
    }
    assert version in {2, 4}
    assert hurt.count(f"starts at step {version}: ") == 4
    (final,) = finals(hurt)
    with harness.job(tmp_path / "undisturbed") as job:
        assert finals(run_and_kill(job, script, *arguments, rank=0, at=NOWHERE, nproc=4)) == [final]


def test_a_shard_that_another_rank_has_too_comes_from_there(tmp_path: pathlib.Path) -> None:
    script = EXAMPLES / "hsdp.py"
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, rank=3, at=("optimizer", 16), nproc=4)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"], record["version"]) == (
            "recover-in-place",
            0,
            15,
        )
    assert re.findall(
        r"rank (\d) \(pid \d+\) starts at step 15: received version 15 from rank "
        r"(\d)",
        hurt,
    ) == [("3", "1")]
    assert hurt.count("starts at step 15: kept in memory") == 3
    (final,) = finals(hurt)
    with harness.job(tmp_path / "undisturbed") as job:
        assert finals(run_and_kill(job, script, rank=0, at=NOWHERE, nproc=4)) == [final]


def test_a_dump_of_four_ranks_is_gone_on_from_with_two(tmp_path: pathlib.Path) -> None:
    """The commands are those of examples/README.md.

    Only the kill is added, and the steps are fewer.
    """
    text = (
        (EXAMPLES / "README.md")
        .read_text()
        .partition("## Fewer processes")[2]
        .partition("```\n")[2]
        .partition("```")[0]
    )
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    settings = dict(word.split("=") for word in commands[0][1:])
    first, second = [command for command in commands if "taskd.run" in command]
    assert [first[3], second[3]] == ["--nproc-per-node=4", "--nproc-per-node=2"]
    assert first[4:] == second[4:] == ["examples/char_gpt.py", "--steps", "60"]
    script, steps = harness.ROOT / first[4], ("--steps", "6")
    with harness.job(tmp_path, **settings) as job:
        hurt = start(job, script, *steps, rank=1, at=("forward", 4), nproc=4)
        assert hurt.returncode == 2, hurt.output[-6000:]
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        (checkpoint,) = folder.scan(
            tmp_path / "taskd_checkpoints", settings["MINDX_TASK_ID"], is_full=True
        ).valid
        assert hurt.last_line.endswith(
            f"rank 1 ended with SIGKILL at step 3; step 3 was saved in {checkpoint.path}"
        )
        (listing,) = [command[1:] for command in commands if command[0] == "taskd"]
        listed = subprocess.run(
            [sys.executable, "-m", "taskd.dump", *listing[1:]],
            env=job.env,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert checkpoint.path.name in listed.stdout
        resumed = start(job, script, *steps, rank=1, at=("forward", 1))
        ended_well(job, resumed)
    assert resumed.output.count(f"starts at step 3: read version 3 from {checkpoint.path}") == 2
    # What the two begin with is what the four had when the fault came.
    before, after = weights(hurt.output, "forward 4"), weights(resumed.output, "forward 1")
    assert len(after) == 2
    assert {told.split()[-1] for told in after} == {told.split()[-1] for told in before}
    assert len({told.split()[-1] for told in before}) == 1
    assert len(finals(resumed.output)) == 1
