"""Every file in examples/ runs. The training scripts: under plain torchrun, and under taskd with one rank killed; equal results."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from tests.process import harness

pytestmark = pytest.mark.slow

EXAMPLES = harness.ROOT / "examples"
KILL_ONCE = pathlib.Path(__file__).parent / "kill_once.py"
MARKED = re.compile(r"# \+ \d(?:  (.*))?$")


def lines_with(text: str, what: str) -> list[str]:
    return sorted(line for line in text.splitlines() if what in line)


def run_plainly(directory: pathlib.Path, script: pathlib.Path, *arguments: str) -> str:
    """Plain torchrun, two ranks, nobody is killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(KILL_ONCE),
               str(directory / "no-marker"), "-1", "0", str(script), *arguments]
    plain = harness.Output(command, harness.environment(), directory / "plain.out", directory)
    try:
        finished = plain.wait(120)
    finally:
        plain.end()
    assert finished.returncode == 0, finished.output[-6000:]
    return finished.output


def run_and_kill(job: harness.Job, script: pathlib.Path, *arguments: str, rank: int, step: int) -> str:
    """taskd's torchrun, two ranks, of which one is killed when it begins an optimizer step."""
    marker = job.facts_dir / "killed"
    manager = job.start_manager()
    agent = job.start_agent(str(KILL_ONCE), str(marker), str(rank), str(step), str(script), *arguments, nproc=2)
    finished = agent.wait(120)
    assert finished.returncode == 0, finished.output[-6000:]
    assert manager.wait(20).returncode == 0, manager.text
    assert marker.exists()
    assert len(job.recoveries()) == 1
    assert job.leftovers() == set()
    return finished.output


@pytest.mark.parametrize("rank", [0, 1])
def test_the_char_gpt_loses_a_rank_and_ends_with_the_same_digest(tmp_path: pathlib.Path, rank: int) -> None:
    script, arguments = EXAMPLES / "char_gpt.py", ("--steps", "6")
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, *arguments, rank=rank, step=4)
        assert job.recoveries()[0]["strategy"] == "recover-in-place"
    (final,) = lines_with(hurt, "final: digest")
    assert [final] == lines_with(run_plainly(tmp_path, script, *arguments), "final: digest")


def test_the_minimal_script_loses_a_rank_and_ends_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    script = EXAMPLES / "minimal_ddp.py"
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, rank=1, step=50)
        assert job.recoveries()[0]["strategy"] == "recover-in-place"
    weights = lines_with(hurt, ": weights ")
    assert len(weights) == 2
    assert weights == lines_with(run_plainly(tmp_path, script), ": weights ")


def test_the_minimal_script_without_its_six_lines_is_a_plain_one(tmp_path: pathlib.Path) -> None:
    with_taskd = (EXAMPLES / "minimal_ddp.py").read_text()
    plain, marks = [], 0
    for line in with_taskd.splitlines():
        found = MARKED.search(line)
        marks += found is not None
        if found is None:
            plain.append(line)
        elif found[1]:                       # a changed line: its comment is the plain one
            plain.append(" " * (len(line) - len(line.lstrip())) + found[1])
    assert marks == 6
    code = "\n".join(plain).partition('"""\n')[2]
    assert "taskd" not in code
    assert "state" not in code
    script = tmp_path / "plain.py"
    script.write_text(code)
    expected = lines_with(run_plainly(tmp_path, EXAMPLES / "minimal_ddp.py"), ": weights ")
    assert len(expected) == 2
    assert lines_with(run_plainly(tmp_path, script), ": weights ") == expected


def test_the_unmodified_script_loses_a_rank_and_resumes_from_its_checkpoint(tmp_path: pathlib.Path) -> None:
    script = EXAMPLES / "unmodified.py"
    with harness.job(tmp_path) as job:
        hurt = run_and_kill(job, script, str(tmp_path / "hurt.pt"), rank=0, step=15)
        assert job.recoveries()[0]["strategy"] == "restart"
    assert lines_with(hurt, "starts at step 10")
    plain = run_plainly(tmp_path, script, str(tmp_path / "plain.pt"))
    assert lines_with(hurt, ": weights ") == lines_with(plain, ": weights ") != []
