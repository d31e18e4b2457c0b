"""The descriptions of jobs in examples/kubernetes fit Kubernetes, the image and each other.

What the operator and Volcano make of them is not tested here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from taskd.config import names, strategies
from taskd.core.timeouts import Timeouts
from tests.examples.test_deployment import DOCKERFILE, instructions
from tests.examples.test_examples import EXAMPLES

if TYPE_CHECKING:
    import pathlib

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra `test`")

MANAGER = EXAMPLES / "kubernetes" / "manager.yaml"
JOBS = sorted({*(EXAMPLES / "kubernetes").glob("*.yaml")} - {MANAGER})
# Pods of these are made anew one by one; the others are saved, and started again as a whole.
REPLACED = {"JobSet", "ClusterTrainingRuntime", "PyTorchJob", "LeaderWorkerSet"}
SETTINGS = {value for name, value in vars(names).items() if name.endswith("_ENV")}
TOLD = {"NNODES", "GPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT"}  # to train_start.sh
OTHERS = {"TTP_PORT"}  # MindIO TTP


@pytest.fixture(params=JOBS, ids=lambda path: path.stem)
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def read(path: pathlib.Path) -> dict[str, Any]:
    """The first description of the file."""
    return next(yaml.safe_load_all(path.read_text()))


def of_jobs(spec: dict[str, Any], name: str) -> tuple[int, str, dict[str, Any]]:
    """Of the Jobs of this name in a JobSet."""
    (job,) = (job for job in spec["replicatedJobs"] if job["name"] == name)
    template = job["template"]["spec"]["template"]
    return job["replicas"], template["spec"]["restartPolicy"], template


def pods(job: dict[str, Any]) -> list[tuple[int, str, dict[str, Any]]]:
    """Number, restart policy and template of each kind of pod that trains."""
    spec = job["spec"]
    if job["kind"] == "JobSet":
        return [of_jobs(spec, "node")]
    if job["kind"] == "ClusterTrainingRuntime":
        return [(spec["mlPolicy"]["numNodes"], *of_jobs(spec["template"]["spec"], "node")[1:])]
    if job["kind"] == "PyTorchJob":
        kinds = spec["pytorchReplicaSpecs"].values()
        return [(kind["replicas"], kind["restartPolicy"], kind["template"]) for kind in kinds]
    if job["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        policy = group["workerTemplate"]["spec"]["restartPolicy"]
        return [(group["size"], policy, group["workerTemplate"])]
    if job["kind"] == "AscendJob":
        kinds = spec["replicaSpecs"].values()
        return [(kind["replicas"], kind["restartPolicy"], kind["template"]) for kind in kinds]
    tasks = spec.get("tasks") or [{"replicas": 1, "template": spec["template"]}]
    return [
        (task["replicas"], task["template"]["spec"]["restartPolicy"], task["template"])
        for task in tasks
    ]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return only


def environment(template: dict[str, Any]) -> dict[str, str]:
    """As the container sees it; the pod's own address is 10.0.0.7."""
    fields = {"status.podIP": "10.0.0.7", "metadata.labels['jobset.sigs.k8s.io/job-index']": "1"}
    for name, value in template.get("metadata", {}).get("annotations", {}).items():
        fields[f"metadata.annotations['{name}']"] = value
    return {
        entry["name"]: entry["value"]
        if "value" in entry
        else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container(template)["env"]
    }


def test_there_is_one_for_each_kind_of_controller() -> None:
    kinds = {(job["apiVersion"], job["kind"]) for job in map(read, JOBS)}
    assert kinds == {
        ("batch/v1", "Job"),
        ("batch.volcano.sh/v1alpha1", "Job"),
        ("mindxdl.gitee.com/v1", "AscendJob"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"),
        ("kubeflow.org/v1", "PyTorchJob"),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    }


def test_its_pods_are_ended_in_good_time_and_not_restarted_in_place_where_that_can_be(job) -> None:
    needed = {"PyTorchJob": "OnFailure", "LeaderWorkerSet": "Always"}
    for _, restart_policy, template in pods(job):
        assert restart_policy == needed.get(job["kind"], "Never")
        period_s = template["spec"]["terminationGracePeriodSeconds"]
        grace_s = float(environment(template)["TASKD_GRACE_S"])
        assert grace_s + Timeouts.derive().give_up_grace_s <= period_s


def test_its_containers_are_told_what_taskd_needs_and_nothing_unknown(job) -> None:
    for _, _, template in pods(job):
        told = environment(template)
        assert told.keys() <= SETTINGS | TOLD | OTHERS
        assert told["POD_IP"] == "10.0.0.7"
        way = "recover" if job["kind"] in REPLACED else "recover-in-place"
        assert {way, "dump"} <= set(strategies(told))
        assert job["kind"] == "AscendJob" or told["MINDX_TASK_ID"] == "my-training"
        ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        assert job["kind"] in REPLACED or ports["taskd-port"] == 9601


def managers() -> list[tuple[str, dict[str, Any]]]:
    """Name in the network and template of each pod that is a manager."""
    runtime = read(EXAMPLES / "kubernetes" / "trainjob.yaml")["spec"]["template"]["spec"]
    jobs = read(EXAMPLES / "kubernetes" / "jobset.yaml")["spec"]
    service, alone = yaml.safe_load_all(MANAGER.read_text())
    assert service["spec"]["selector"] == alone["spec"]["template"]["metadata"]["labels"]
    in_set = "my-training-manager-0-0.my-training"  # <set>-<jobs>-<job>-<pod>.<set>
    return [
        (in_set, of_jobs(runtime, "manager")[2]),
        (in_set, of_jobs(jobs, "manager")[2]),
        (service["metadata"]["name"], alone["spec"]["template"]),
    ]


def test_the_manager_of_pods_that_are_replaced_is_a_pod_of_its_own() -> None:
    names_of = {name for name, _ in managers()}
    for job in map(read, JOBS):
        for _, _, template in pods(job):
            assert ("TASKD_MANAGER_ADDR" in environment(template)) == (job["kind"] in REPLACED)
            assert environment(template).get("TASKD_MANAGER_ADDR") in {*names_of, None}
    training = environment(pods(read(EXAMPLES / "kubernetes" / "jobset.yaml"))[0][2])
    for _, template in managers():
        told = environment(template)
        assert told["TASKD_PROCESS_ENABLE"] == "on"
        assert template["spec"]["restartPolicy"] == "OnFailure"
        for name in ("MINDX_TASK_ID", "TASKD_RECOVER_STRATEGY", "POD_IP"):
            assert told[name] == training[name]
        size = {"--nnodes": training["NNODES"], "--nproc-per-node": training["GPUS_PER_NODE"]}
        words = container(template)["command"]
        assert {word: words[words.index(word) + 1] for word in size} == size
        assert container(template)["ports"] == [{"containerPort": 9601, "name": "taskd-port"}]


def test_no_default_of_the_controller_ends_the_other_pods() -> None:
    """docs/launchers.md says which would."""
    folder = EXAMPLES / "kubernetes"
    jobs = read(folder / "jobset.yaml")["spec"]
    assert jobs["failurePolicy"]["rules"] == [{"action": "RestartJobAndIgnoreMaxRestarts"}]
    (node,) = (job for job in jobs["replicatedJobs"] if job["name"] == "node")
    assert (node["replicas"], node["template"]["spec"]["backoffLimit"]) == (2, 0)
    runtime = read(folder / "trainjob.yaml")["spec"]["template"]["spec"]
    (node,) = (job for job in runtime["replicatedJobs"] if job["name"] == "node")
    assert "failurePolicy" not in runtime
    assert node["template"]["spec"]["backoffLimit"] == 2147483647
    assert node["template"]["spec"]["podReplacementPolicy"] == "Failed"
    pytorch = read(folder / "pytorchjob.yaml")["spec"]
    assert "elasticPolicy" not in pytorch
    assert pytorch["runPolicy"]["cleanPodPolicy"] == "None"
    group = read(folder / "leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "None"


def test_its_size_is_the_same_wherever_it_is_told(job) -> None:
    nodes = sum(number for number, _, _ in pods(job))
    for _, _, template in pods(job):
        told = environment(template)
        assert int(told.get("NNODES", "1")) == nodes
        limits = container(template).get("resources", {}).get("limits", {})
        for device in ("huawei.com/Ascend910", "nvidia.com/gpu"):
            each = int(told["GPUS_PER_NODE"])
            assert limits.get(device, each) == each
    spec = job["spec"]
    gang = spec.get("runPolicy", {}).get("schedulingPolicy", spec).get("minAvailable", nodes)
    assert gang == nodes


def test_its_checkpoints_outlive_its_pods(job) -> None:
    for _, _, template in pods(job):
        mounts = container(template)["volumeMounts"]
        mounted = {mount["mountPath"]: mount["name"] for mount in mounts}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert set(mounted.values()) == volumes.keys()
        place = mounted[environment(template)["TASKD_CHECKPOINT_DIR"]]
        assert "persistentVolumeClaim" in volumes[place]


def test_its_commands_are_in_the_image(job) -> None:
    directory = next(line.split()[1] for line in instructions() if line.startswith("WORKDIR"))
    copied = [line.split()[1:-1] for line in instructions() if line.startswith("COPY ")]
    scripts = {f"examples/{name}" for name in ("train_start.sh", "pre_stop.sh")}
    assert scripts <= {word for words in copied for word in words}, DOCKERFILE
    for _, _, template in pods(job):
        inside = container(template)
        assert inside["lifecycle"]["preStop"]["exec"]["command"] == [f"{directory}/pre_stop.sh"]
        assert "./train_start.sh " in " ".join(inside["command"])


def test_the_job_of_the_operator_has_what_the_operator_looks_for() -> None:
    job = read(EXAMPLES / "kubernetes" / "ascendjob.yaml")
    assert list(job["spec"]["replicaSpecs"]) == ["Master", "Worker"]
    assert job["metadata"]["labels"]["framework"] == "pytorch"
    for _, _, template in pods(job):
        assert container(template)["name"] == "ascend"
        ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        assert ports == {"ascendjob-port": 2222, "ttp-port": 8000, "taskd-port": 9601}
        strategy = job["metadata"]["annotations"]["recover-strategy"]
        assert environment(template)["TASKD_RECOVER_STRATEGY"] == strategy


def test_its_pods_are_those_of_the_schema_of_kubernetes(job) -> None:
    """Where the package is there: with its schemas it is larger (108 MB) than the other tests."""
    schema = pytest.importorskip("kubernetes_validate")
    for _, restart_policy, template in pods(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a-pod"}, **template}
        pod["metadata"] = {"name": "a-pod"} | template.get("metadata", {})
        pod["spec"] = {**template["spec"], "restartPolicy": restart_policy}
        schema.validate(pod, schema.latest_version(), strict=True)
