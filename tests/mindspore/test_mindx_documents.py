"""The documents that speak of mindx_elastic on MindSpore, acted out: their code, smaller nets."""

import importlib.util
import json
import os
import signal
import time

import pytest

from tests.mindspore.jobs import ROOT
from tests.mindspore.mindx.training import HERE, Training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="needs MindSpore: make test-mindspore"
)
ENDED = -signal.SIGTERM


@pytest.fixture
def training(tmp_path):
    made = []

    def make(script: str) -> Training:
        made.append(Training(tmp_path, script))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_graceful_exit_of_a_job_with_one_rank(training) -> None:
    """The platform sends SIGTERM, starts the container again, the script loads the dying gasp."""
    job = training("cifar.py")
    job.start()
    job.until(0, "epoch: 3 step: 5")
    job.terminate(0)
    assert job.wait() == [ENDED]
    (path,) = job.checkpoints.glob("*_breakpoint.ckpt")
    assert path.name.startswith("train_resnet_cifar10-")
    epoch = path.name.split("-")[1].split("_")[0]
    assert int(epoch) >= 3
    job.run(EPOCHS=1)
    assert f"loaded {path.name} {epoch}" in job.text()
    # What MindSpore was writing in the background has been written to its end.
    for one in job.checkpoints.glob("*.ckpt"):
        assert one.stat().st_size > 0
    assert not list(job.checkpoints.glob("*.tmp"))


def test_the_dying_gasp_of_resnet(training) -> None:
    job = training("resnet.py")
    job.start()
    job.until(0, "dying gasp")
    job.until(0, "epoch: 2 step: 5")
    job.terminate(0)
    assert job.wait() == [ENDED]
    folder = job.checkpoints / "checkpoint" / "ckpt_0"
    (path,) = folder.glob("*_breakpoint.ckpt")
    job.run(EPOCHS=1)
    assert f"pre trained ckpt model {job.checkpoints}/./checkpoint/ckpt_0/{path.name}" in job.text()
    trained = next(line for line in job.output[0] if line.startswith("has trained")).split()
    assert int(trained[3]) >= 25
    assert "dying gasp" not in job.text()  # within a minute of the last one: the script's own rule
    old = time.time() - 120
    os.utime(path, (old, old))
    job.start()
    job.until(0, "dying gasp")
    job.until(0, "epoch: 2 step: 5")
    job.terminate(0)
    assert job.wait() == [ENDED]
    newest = max(one.stat().st_mtime for one in folder.glob("*_breakpoint.ckpt"))
    assert newest > old + 60


def group_files(job: Training, restore) -> None:
    """As MindSpore writes them where it splits a model."""
    from mindspore.train import node_strategy_pb2

    for rank, members in restore.items():
        message = node_strategy_pb2.ParallelGroupMap()
        message.ckpt_restore_rank_list.dim.extend(members)
        job.group_file(rank).write_bytes(message.SerializeToString())


def test_the_restoration_of_pangu_alpha_without_the_rank_whose_chip_is_faulty(
    training, tmp_path
) -> None:
    options = {
        "GROUP_INFO_FILE": tmp_path / "device%d" / "group_info.pb",
        "GROUP_INFO_ENV": tmp_path / "group_info_env",
    }
    undisturbed = training("pangu.py").run(2, **options)
    job = training("pangu.py")
    job.start(2, **options)
    for rank in (0, 1):
        job.until(rank, "step 25")
    job.terminate(0, 1)
    assert job.wait() == [ENDED, ENDED]
    assert "flag False 0" in job.text()  # the first start had nothing to restore
    group_files(job, {0: [0, 1], 1: [0, 1]})
    (tmp_path / "fault-npus").write_text(json.dumps({"FaultRankIds": ["0"], "CreatTime": 1}))
    assert job.run(2, **options) == undisturbed
    for rank in (0, 1):
        assert 'restore ranks: 1, restore dict: {"0,1": 1}' in job.text(rank)
        assert "loading map rank id 1" in job.text(rank)
        assert "flag True" in job.text(rank)
    lines = (tmp_path / "group_info_env").read_text().splitlines()
    assert len(lines) == 6
    assert set(lines) == {
        f"export GROUP_INFO_FILE_REFLECT={job.group_file(rank)}" for rank in (0, 1)
    }


def test_pangu_alpha_goes_on_from_ordinary_checkpoints_where_there_is_no_way(
    training, tmp_path
) -> None:
    options = {
        "GROUP_INFO_FILE": tmp_path / "device%d" / "group_info.pb",
        "GROUP_INFO_ENV": tmp_path / "group_info_env",
    }
    job = training("pangu.py")
    job.start(2, **options)
    for rank in (0, 1):
        job.until(rank, "step 25")
    job.terminate(0, 1)
    job.wait()
    group_files(job, {0: [0], 1: [1]})  # each has a part of its own, and chip 0 is faulty
    (tmp_path / "fault-npus").write_text(json.dumps({"FaultRankIds": ["0"]}))
    job.run(2, **options)
    assert "restore ranks: -1, restore dict: None" in job.text(1)
    assert "flag False 0" in job.text(1)


@pytest.mark.timeout(900)
def test_pangu_alpha_under_our_msrun_agent_goes_on_after_a_kill(training, job, tmp_path) -> None:
    """The rank that is left waits in AllReduce when the agent ends it, and has little time."""
    script = tmp_path / "pangu.py"
    script.write_text(f"""
import os, runpy, sys
rank = os.environ["RANK_ID"]
os.environ["GROUP_INFO_FILE"] = f"{tmp_path}/device{{rank}}/group_info.pb"
runpy.run_path("{HERE / "pangu.py"}", run_name="__main__")
""")
    files = training("pangu.py")  # for its folders alone
    group_files(files, {0: [0, 1], 1: [0, 1]})
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'packages/mindx_elastic'}",
        "GROUP_INFO_ENV": str(tmp_path / "group_info_env"),
        "MINDX_ELASTIC_DIR": str(tmp_path / "state"),
        "MINDX_FAULT_NPUS": str(tmp_path / "fault-npus"),
    }
    arguments = [2, script, str(files.checkpoints)]
    assert job.start(*arguments, MINDX_TASK_ID="undisturbed", **environment).end() == 0, job.output
    digests = job.digests(2)
    assert len(digests) == 1

    job.start(*arguments, MINDX_TASK_ID="killed", **environment)
    while "step 25\n" not in job.said(0):
        assert job.process.poll() is None, "it ended too soon"
        time.sleep(0.02)  # a log file cannot be waited for
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.end() == 0, job.output
    (path,) = (files.checkpoints / "rank_0").glob("*_breakpoint.ckpt")
    step = int(path.name.removesuffix("_breakpoint.ckpt").split("_")[-1])
    assert step >= 25
    for rank in (0, 1):
        assert 'restore ranks: 0, restore dict: {"0,1": 0}' in job.said(rank)
        assert f"flag True {step}" in job.said(rank)
    assert job.digests(2) == digests
    (record,) = job.records
    assert record["strategy"] == "restart"
