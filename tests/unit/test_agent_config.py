"""What an agent takes from its environment, and from what launchers have set in it."""

from __future__ import annotations

import pathlib

import pytest

from taskd.config import (
    AgentConfig,
    LogConfig,
)
from taskd.config.slurm import MAX_NODES, nodes_of_allocation
from tests.unit.test_config import refusal

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_an_agent_without_settings_has_the_documented_defaults() -> None:
    assert AgentConfig.load({}) == AgentConfig(
        "default_job",
        "127.0.0.1:9601",
        30.0,
        None,
        LogConfig(pathlib.Path("./taskd_log/")),
        wait_for_exit=False,
        native=True,
        forkserver="auto",
        preload=(),
        learns_preload=True,
        own_address="127.0.0.1",
        host=BOOT,
        node_memory="",
        reschedule_s=270.0,
    )


def test_node_memory_is_kept_for_as_long_as_a_lost_node_may_come_back() -> None:
    environment = {"TASKD_NODE_MEMORY": "/dev/shm", "TASKD_WAIT_RESCHEDULE_TIMEOUT": "100"}
    config = AgentConfig.load(environment | {"TASKD_FAULT_TIMEOUT": "6"})
    assert (config.node_memory, config.memory_kept_s) == ("/dev/shm", 124.0)


@pytest.mark.parametrize("text", ["shm", "./shm", "~/shm"])
def test_node_memory_has_an_absolute_path(text: str) -> None:
    environment = {"TASKD_NODE_MEMORY": text}
    refusal(lambda: AgentConfig.load(environment), "TASKD_NODE_MEMORY", "absolute path")


@pytest.mark.parametrize(
    ("environment", "own", "expected"),
    [
        ({}, None, ("127.0.0.1", BOOT)),
        ({}, "10.0.0.1", ("10.0.0.1", BOOT)),
        ({"POD_IP": "10.0.0.7"}, "10.0.0.1", ("10.0.0.7", BOOT)),
        ({"TASKD_HOST": "rack 4"}, None, ("127.0.0.1", "rack 4")),
    ],
)
def test_where_other_nodes_find_an_agent_and_on_which_host_it_is(
    environment: dict, own: str | None, expected: tuple[str, str]
) -> None:
    config = AgentConfig.load(environment, own_address=own)
    assert (config.own_address, config.host) == expected


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "master:9601"),
        ({"TASKD_PORT": "7"}, "master:7"),
        ({"LOCAL_PROXY_ENABLE": "on"}, "127.0.0.1:9601"),
        ({"TASKD_MANAGER_ADDR": "other"}, "other:9601"),
        ({"TASKD_MANAGER_ADDR": "other:8", "TASKD_PORT": "7"}, "other:8"),
        ({"TASKD_MANAGER_ADDR": "::1"}, "[::1]:9601"),
        ({"TASKD_MANAGER_ADDR": "[::1]:8"}, "[::1]:8"),
    ],
)
def test_where_an_agent_finds_the_manager(environment: dict, address: str) -> None:
    assert (
        AgentConfig.load(
            environment, master_addr="master", rendezvous_host="rendezvous"
        ).manager_address
        == address
    )


@pytest.mark.parametrize(
    ("environment", "others"),
    [
        ({"TASKD_MANAGER_ADDR": "one"}, ()),
        ({"TASKD_MANAGER_ADDR": "one:8, two,[::1]:7"}, ("two:9601", "[::1]:7")),
        ({"SLURM_JOB_NODELIST": "master,n[1-2]"}, ("n1:9601", "n2:9601")),
        (
            {"TASKD_MANAGER_ADDR": "n2:8,other", "SLURM_JOB_NODELIST": "n[1-2]"},
            ("other:9601", "n1:8"),
        ),
    ],
)
def test_where_a_torchrun_that_comes_late_finds_another_manager(
    environment: dict, others: tuple[str, ...]
) -> None:
    assert AgentConfig.load(environment, master_addr="master").other_addresses == others


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("one", ["one"]),
        ("one,n[1-3,07],n[009-010]", ["one", "n1", "n2", "n3", "n07", "n009", "n010"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("n[3-1]", []),
        ("n[1-3", []),
        ("n[a-b],one", ["one"]),
        ("n]1[,one", ["one"]),
    ],
)
def test_the_names_of_the_nodes_of_slurm(text: str, names: list[str]) -> None:
    assert nodes_of_allocation({"SLURM_JOB_NODELIST": text}) == names


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[0-99][0-99][0-99]", "a,n[1-9999],b"])
def test_no_more_nodes_of_slurm_are_asked_than_a_job_has(text: str) -> None:
    assert len(nodes_of_allocation({"SLURM_JOB_NODELIST": text})) == MAX_NODES


def test_without_master_address_the_rendezvous_host_is_asked() -> None:
    assert AgentConfig.load({}, rendezvous_host="rendezvous").manager_address == "rendezvous:9601"


def test_an_agent_takes_its_settings_from_the_environment() -> None:
    loaded = AgentConfig.load(
        {"TASKD_NATIVE": "off", "TASKD_FORKSERVER": "exec", "TASKD_PRELOAD": "numpy, a.b ,"},
        job_id="run-id",
        wait_for_exit=True,
    )
    assert (loaded.native, loaded.forkserver, loaded.preload) == (False, "exec", ("numpy", "a.b"))
    assert (loaded.job_id, loaded.wait_for_exit) == ("run-id", True)
    assert AgentConfig.load({"MINDX_TASK_ID": "m"}, job_id="run-id").job_id == "m"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TASKD_NATIVE", "0"),
        ("TASKD_NUMERIC_NAMES", "no"),
        ("TASKD_FORKSERVER", "maybe"),
        ("TASKD_PRELOAD", "os; rm"),
        ("TASKD_MANAGER_ADDR", "tcp://x"),
        ("TASKD_MANAGER_ADDR", ":1"),
        ("TASKD_MANAGER_ADDR", "x:0"),
    ],
)
def test_wrong_agent_variables_are_named(key: str, value: str) -> None:
    refusal(lambda: AgentConfig.load({key: value}), key, repr(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ((), True)),
        ("auto", ((), True)),
        ("off", ((), False)),
        ("numpy, a.b", (("numpy", "a.b"), False)),
    ],
)
def test_what_is_preloaded(value: str, expected: tuple[tuple[str, ...], bool]) -> None:
    loaded = AgentConfig.load({"TASKD_PRELOAD": value})
    assert (loaded.preload, loaded.learns_preload) == expected
