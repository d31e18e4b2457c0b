"""The descriptions of examples/kubernetes whose pods are replaced, acted out with processes.

A pod is its container's command with the variables that its description has, and those that the
system sets, as docs/launchers.md says. One is killed and made anew with the same index, another
address and nothing else. What the controllers themselves do is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.examples.test_deployment import START, programs
from tests.examples.test_examples import EXAMPLES
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import (
    check_recovered,
    reference,  # noqa: F401
)

pytest.importorskip("yaml", reason="PyYAML is in the extra `test`")
from tests.examples.test_kubernetes import (
    container,
    environment,
    pods,
    read,
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    Reference = Callable[..., dict[int, str]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended(
        "tests/process/test_nodes.py: test_another_torchrun_takes_the_place_of_a_lost_node[once]; "
        "nearest to the commands and variables: test_kubernetes.py, which reads them"
    ),
]

LIMIT_S = 90
STEPS = {"STEPS": "60"}


def set_by_the_system(system: str, index: int, port: int) -> dict[str, str]:
    """In each container of pod `index`; all names mean this machine."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "2"}
    pet |= {f"PET_{name}": value for name, value in here.items()}
    return {
        "trainjob": {"JOB_COMPLETION_INDEX": str(index), **pet},
        # each pod is the only one of its Job; its description takes RANK from the label
        "jobset": {"JOB_COMPLETION_INDEX": "0", "RANK": str(index)},
        "pytorchjob": {
            "RANK": str(index),
            "WORLD_SIZE": "2",
            "PYTHONUNBUFFERED": "1",
            **here,
            **pet,
        },
        "leaderworkerset": {
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": "127.0.0.1",
        },
    }[system]


class Set:
    """The pods of one description, and their manager."""

    def __init__(self, job: harness.Job, system: str) -> None:
        self.job, self.system = job, system
        self._lives = 0
        self._path = programs(job.directory / "bin")
        (job.directory / "train_start.sh").symlink_to(START)
        (job.directory / "train.py").symlink_to(harness.SCRIPTS / "train.py")
        job.start_manager("--nnodes", "2", "--nproc-per-node", "2").wait_text("listens on", LIMIT_S)

    def start(self, index: int) -> harness.Output:
        """A pod: for the first time, or anew."""
        self._lives += 1
        template = pods(read(EXAMPLES / "kubernetes" / f"{self.system}.yaml"))[0][2]
        directory = self.job.directory
        smaller = {"GPUS_PER_NODE": "2", "TASKD_CHECKPOINT_DIR": str(directory / "checkpoints")}
        image = {
            "PATH": self._path,
            "LAUNCHER": "python3 -m taskd.run",
            "PID_FILE": str(directory / f"torchrun-{index}.pid"),
            "POD_IP": f"127.0.0.{10 + self._lives}",
            "TASKD_MANAGER_ADDR": "127.0.0.1",
            "MINDX_TASK_ID": "test-job",
            "MASTER_PORT": str(self.job.master_port),
        }
        system = set_by_the_system(self.system, index, self.job.master_port)
        leader = "my-training-node-0-0.my-training"  # of jobset.yaml
        told = [word.replace(leader, "127.0.0.1") for word in container(template)["command"]]
        pod = harness.Output(
            told,
            self.job.env | environment(template) | smaller | image | system,
            directory / f"pod-{self._lives}.out",
            directory,
        )
        self.job.agents.append(pod)
        return pod


@pytest.mark.parametrize("system", ["trainjob", "jobset", "pytorchjob", "leaderworkerset"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_pod_that_is_made_anew_has_its_place_again(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    system: str,
    lost: int,
) -> None:
    env = {"TASKD_RECOVER_STRATEGY": "recover,dump", "TASKD_FAULT_TIMEOUT": "6", "SLEEP_S": "0.05"}
    with harness.job(tmp_path, **env, **STEPS) as job:
        found = Set(job, system)
        running = [found.start(index) for index in range(2)]
        wait_for_step(job, 8)
        before = len(job.facts("entered"))
        running[lost].end()
        running[lost] = found.start(lost)
        wait_until(job, lambda: len(job.digests()) == 4)
        assert len(job.facts("entered")) > before
        if system == "leaderworkerset":  # a pod that has ended would be started again
            wait_until(job, lambda: all("sleep" in _below(pod) for pod in running))
            for pod in running:
                pod.end()
            assert job.digests() == reference(**STEPS)
        else:
            assert running[lost].wait(LIMIT_S).returncode == 0, job.story()
            finished = running[1 - lost].wait(LIMIT_S)
            replaced = {2 * lost, 2 * lost + 1}
            check_recovered(job, finished, reference(**STEPS), faults=0, replaced=replaced)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover", 0)


def _below(pod: harness.Output) -> str:
    """What the first process of the pod is now."""
    with open(f"/proc/{pod.process.pid}/comm", encoding="ascii") as name:
        return name.read()
