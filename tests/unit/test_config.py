"""Every key and variable.

Default, accepted values, and an error that names key, value and what is accepted.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import signal

import pytest

from taskd import config
from taskd.config import (
    AgentConfig,
    CallbackAgentConfig,
    LogConfig,
    ManagerConfig,
    RelayConfig,
    WorkerConfig,
    launcher,
)
from taskd.config.msrun import MsrunConfig
from taskd.config.names import OF_TASKD
from taskd.config.signals import interrupt_signal
from taskd.errors import ConfigError

PT = {"RANK": "5", "LOCAL_WORLD_SIZE": "2"}


def refusal(load, *names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load()
    assert "expected" in str(caught.value)
    for name in names:
        assert name in str(caught.value)


def test_a_manager_without_settings_has_the_documented_defaults() -> None:
    loaded = ManagerConfig.load({}, {})
    assert loaded == ManagerConfig(
        "default_job", "127.0.0.1:9601", 30.0, None, LogConfig(pathlib.Path("./taskd_log/"))
    )
    assert (loaded.node_count, loaded.ranks_per_node, loaded.is_enabled) == (None, None, True)
    assert ManagerConfig.load(None, {}) == loaded
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.job_id = "other"


def test_a_manager_takes_its_settings_from_dict_and_environment() -> None:
    loaded = ManagerConfig.load(
        {
            "job_id": "j",
            "node_nums": 2,
            "proc_per_node": 8,
            "plugin_dir": "x",
            "fault_recover": "",
            "taskd_enable": "on",
            "cluster_infos": {},
        },
        {
            "MINDX_TASK_ID": "other",
            "TASKD_PORT": "7000",
            "POD_IP": "10.0.0.7",
            "TASKD_FAULT_TIMEOUT": "2.5",
            "TASKD_JOIN_TIMEOUT": "60",
            "TASKD_LOG_PATH": "/var/log/x",
            "TASKD_FILE_LOG_LEVEL": "DEBUG",
            "TASKD_STD_LOG_LEVEL": "ERROR",
            "TASKD_LOG_STDOUT": "False",
            "TASKD_PROCESS_ENABLE": "off",
        },
    )
    assert (loaded.job_id, loaded.node_count, loaded.ranks_per_node) == ("j", 2, 8)
    assert (loaded.bind_address, loaded.fault_timeout_s, loaded.is_enabled) == (
        "10.0.0.7:7000",
        2.5,
        False,
    )
    assert (loaded.join_timeout_s, ManagerConfig.load({}, {}).join_timeout_s) == (60.0, 1800.0)
    assert loaded.log == LogConfig(pathlib.Path("/var/log/x"), "DEBUG", "ERROR", to_std=False)
    assert ManagerConfig.load({}, {"MINDX_TASK_ID": "m"}).job_id == "m"


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"POD_IP": "10.0.0.7", "LOCAL_PROXY_ENABLE": "on"}, "127.0.0.1:9601"),
        ({"POD_IP": "10.0.0.7", "LOCAL_PROXY_ENABLE": "off"}, "10.0.0.7:9601"),
        ({"POD_IP": "10.0.0.7", "TASKD_BIND_ADDR": "10.0.0.8"}, "10.0.0.8:9601"),
        ({"TASKD_BIND_ADDR": "10.0.0.8:1", "LOCAL_PROXY_ENABLE": "on"}, "10.0.0.8:1"),
        ({"TASKD_BIND_ADDR": "*"}, "0.0.0.0:9601"),
        ({"TASKD_BIND_ADDR": "localhost", "TASKD_PORT": "5"}, "127.0.0.1:5"),
        ({"POD_IP": "fe80::1"}, "[fe80::1]:9601"),
        ({"TASKD_BIND_ADDR": "[::1]:77"}, "[::1]:77"),
        ({"TASKD_BIND_ADDR": "[::1]"}, "[::1]:9601"),
        ({"POD_IP": ""}, "127.0.0.1:9601"),
        ({"POD_IP": "some.host"}, "some.host:9601"),
    ],
)
def test_where_the_manager_listens(environment: dict, address: str) -> None:
    assert ManagerConfig.load({}, environment).bind_address == address


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job_id", 5),
        ("node_nums", "2"),
        ("node_nums", 0),
        ("node_nums", True),
        ("node_nums", -1),
        ("proc_per_node", 1.5),
        ("plugin_dir", 1),
        ("fault_recover", True),
        ("taskd_enable", 1),
        ("cluster_infos", "x"),
    ],
)
def test_wrong_manager_settings_are_named(key: str, value: object) -> None:
    refusal(lambda: ManagerConfig.load({key: value}, {}), key, repr(value))


@pytest.mark.parametrize("settings", ["x", [1], {1: 2}])
def test_settings_are_a_dict_with_strings_as_keys(settings: object) -> None:
    refusal(lambda: ManagerConfig.load(settings, {}), "config")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TASKD_PORT", "x"),
        ("TASKD_PORT", "0"),
        ("TASKD_PORT", "65536"),
        ("TASKD_PORT", "-1"),
        ("TASKD_PORT", "٣"),
        ("TASKD_JOIN_TIMEOUT", "0"),
        ("TASKD_FAULT_TIMEOUT", "0"),
        ("TASKD_FAULT_TIMEOUT", "-3"),
        ("TASKD_FAULT_TIMEOUT", "nan"),
        ("TASKD_FAULT_TIMEOUT", "inf"),
        ("TASKD_FAULT_TIMEOUT", "soon"),
        ("TASKD_FILE_LOG_LEVEL", "LOUD"),
        ("TASKD_STD_LOG_LEVEL", "info"),
        ("TASKD_LOG_STDOUT", "no"),
        ("TASKD_PROCESS_ENABLE", "yes"),
        ("LOCAL_PROXY_ENABLE", "1"),
        ("POD_IP", "a b"),
        ("TASKD_BIND_ADDR", "1.2.3.4:x"),
        ("TASKD_BIND_ADDR", "[::1"),
        ("TASKD_BIND_ADDR", "[::1]x"),
        ("TASKD_SECRET_FILE", "/no/such/file"),
    ],
)
def test_wrong_variables_are_named(key: str, value: str) -> None:
    refusal(lambda: ManagerConfig.load({}, {key: value}), key, repr(value))


@pytest.mark.parametrize(
    ("text", "number"),
    [(None, 9), ("", 9), ("SIGRTMIN+4", 4), (" SIGRTMIN+25", 25), (str(signal.SIGRTMIN + 12), 12)],
)
def test_the_signal_of_interrupts_is_a_real_time_one(text: str | None, number: int) -> None:
    environment = {} if text is None else {"TASKD_INTERRUPT_SIGNAL": text}
    assert interrupt_signal(environment) == signal.SIGRTMIN + number
    AgentConfig.load(environment)


@pytest.mark.parametrize("text", ["SIGRTMIN+3", "SIGRTMIN+26", "10", "99", "SIGUSR1", "+9", "x"])
def test_a_signal_that_cannot_be_is_refused(text: str) -> None:
    environment = {"TASKD_INTERRUPT_SIGNAL": text}
    refusal(lambda: AgentConfig.load(environment), "TASKD_INTERRUPT_SIGNAL", "SIGRTMIN+25")


def test_a_worker_finds_its_node_by_framework() -> None:
    loaded = WorkerConfig.load(5, 100, "pt", PT)
    assert loaded == WorkerConfig("default_job", 5, 2, 100, "pt", "127.0.0.1:9602", None)
    assert WorkerConfig.load(5, 0, "ms", {"MS_NODE_RANK": "3"}).node_rank == 3
    assert (
        WorkerConfig.load(0, 0, "pt", PT | {"TASKD_MANAGER_ADDR": "m"}).upstream_address == "m:9601"
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "key"),
    [
        ((-1, 1, "pt"), PT, "rank_id"),
        (("1", 1, "pt"), PT, "rank_id"),
        ((True, 1, "pt"), PT, "rank_id"),
        ((0, -1, "pt"), PT, "upper_limit_of_disk_in_mb"),
        ((0, 1.5, "pt"), PT, "upper_limit_of_disk_in_mb"),
        ((0, 1, "tf"), PT, "framework"),
        ((0, 1, None), PT, "framework"),
        ((0, 1, "pt"), {"LOCAL_WORLD_SIZE": "2"}, "RANK"),
        ((0, 1, "pt"), {"RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ((0, 1, "pt"), {"RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, "RANK"),
        ((0, 1, "pt"), {"RANK": "x", "LOCAL_WORLD_SIZE": "2"}, "RANK"),
        ((0, 1, "pt"), {"RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ((0, 1, "ms"), PT, "MS_NODE_RANK"),
    ],
)
def test_wrong_worker_arguments_are_named(arguments: tuple, environment: dict, key: str) -> None:
    refusal(lambda: WorkerConfig.load(*arguments, environment), key)


def test_a_relay_without_settings_has_the_documented_defaults() -> None:
    assert RelayConfig.load({}, {}) == RelayConfig("127.0.0.1:9602", "127.0.0.1:9601", 0, None)
    assert RelayConfig.load(None, {"RANK": "2"}).node_rank == 2
    assert RelayConfig.load({}, {"MS_NODE_RANK": "3"}).node_rank == 3
    loaded = RelayConfig.load(
        {
            "ListenAddr": "::1",
            "ListenPort": "1",
            "UpstreamAddr": "10.0.0.1",
            "UpstreamPort": "2",
            "ServerRank": "4",
        },
        {},
    )
    assert loaded == RelayConfig("[::1]:1", "10.0.0.1:2", 4, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ListenAddr", "some host"),
        ("ListenAddr", 5),
        ("ListenAddr", ""),
        ("UpstreamAddr", "a.b:1"),
        ("ListenPort", 9602),
        ("ListenPort", "x"),
        ("UpstreamPort", "0"),
        ("ServerRank", "-1"),
        ("ServerRank", 1),
        ("ServerRank", "a"),
    ],
)
def test_wrong_relay_settings_are_named(key: str, value: object) -> None:
    refusal(lambda: RelayConfig.load({key: value}, {}), key, repr(value))


def test_a_relay_takes_names_of_hosts() -> None:
    loaded = RelayConfig.load({"ListenAddr": "localhost", "UpstreamAddr": "job-master-0"}, {})
    assert loaded.listen_address == "localhost:9602"
    assert loaded.upstream_address == "job-master-0:9601"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("node_num", "node_nums"),
        ("Node_Nums", "node_nums"),
        ("nproc_per_node", "proc_per_node"),
        ("strategy", "recover_strategy"),
        ("colour", ""),
    ],
)
def test_a_key_that_nobody_reads_is_found_with_the_nearest_one(key: str, near: str) -> None:
    assert config.unknown({key: 1, "job_id": "j"}, ManagerConfig.KEYS) == [(key, near)]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("TASKD_FAULT_TIMOUT", ["TASKD_FAULT_TIMEOUT"]),
        ("TASKD_GRACE", ["TASKD_GRACE_S"]),
        ("TASKD_CHECKPOINTS_DIR", ["TASKD_CHECKPOINT_DIR"]),
        ("TASKD_FAULT_TIMEOUT", []),
        ("TASKD_WORKER", []),
        ("TASKD_TEST_SEED", []),
        ("TASKD_BUILD_NATIVE", []),
        # of MindCluster
        ("TASKD_PROCESS_INTERVAL", []),
        ("TASKD_REPORT_FAULT_TIMEOUT", []),
        ("RANKS", []),
    ],
)
def test_only_a_variable_that_is_nearly_one_of_ours_is_misspelt(name, near) -> None:
    assert config.misspelt_variables({name: "1", "TASKD_PORT": "9"}) == [(name, it) for it in near]


def test_no_variable_of_ours_is_a_misspelt_one() -> None:
    assert "TASKD_MANAGER" in OF_TASKD
    assert config.misspelt_variables(dict.fromkeys(OF_TASKD, "")) == []


def test_keys_that_are_known_or_ignored_are_not_spoken_of() -> None:
    for kind in (ManagerConfig, RelayConfig, CallbackAgentConfig):
        assert config.unknown(dict.fromkeys(kind.KEYS, ""), kind.KEYS) == []
    assert config.unknown(None, ManagerConfig.KEYS) == []


def test_an_agent_of_callbacks_finds_its_rank_in_settings_or_environment() -> None:
    loaded = CallbackAgentConfig.load({"Framework": "PyTorch"}, {"RANK": "1"})
    assert loaded == CallbackAgentConfig("default_job", "127.0.0.1:9602", 1, 30.0, None)
    loaded = CallbackAgentConfig.load(
        {"Framework": "PyTorch", "ServerRank": "7", "UpstreamAddr": "::1", "UpstreamPort": "9"},
        {"RANK": "1"},
    )
    assert (loaded.upstream_address, loaded.node_rank) == ("[::1]:9", 7)


def test_the_agent_of_msrun_is_told_its_node_its_manager_and_its_budget() -> None:
    loaded = MsrunConfig.load(
        {"Framework": "MindSpore", "UpstreamAddr": "10.0.0.1"},
        {"MS_NODE_RANK": "2", "TASKD_MAX_RESTARTS": "3"},
    )
    assert (loaded.node_rank, loaded.max_restarts) == (2, 3)
    assert loaded.upstream_address == "10.0.0.1:9601"
    unsaid = MsrunConfig.load({"Framework": "MindSpore"}, {})
    assert (unsaid.node_rank, unsaid.max_restarts, unsaid.upstream_address) == (None, 32767, "")


@pytest.mark.parametrize(
    ("settings", "environment", "key"),
    [
        ({"ServerRank": "x"}, {}, "ServerRank"),
        ({}, {"TASKD_MAX_RESTARTS": "-1"}, "TASKD_MAX_RESTARTS"),
        ({"UpstreamPort": 9601}, {}, "UpstreamPort"),
        ({}, {"TASKD_FAULT_TIMEOUT": "soon"}, "TASKD_FAULT_TIMEOUT"),
    ],
)
def test_wrong_settings_of_the_agent_of_msrun_are_named_before_it_starts(
    settings: dict, environment: dict, key: str
) -> None:
    refusal(lambda: MsrunConfig.load(settings, environment), key)


def test_msrun_is_left_alone_where_taskd_is_switched_off() -> None:
    with pytest.raises(ConfigError, match="TASKD_PROCESS_ENABLE is off"):
        MsrunConfig.load({"Framework": "MindSpore"}, {"TASKD_PROCESS_ENABLE": "off"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "Framework"),
        ({"Framework": "TensorFlow"}, "Framework"),
        ({"Framework": 3}, "Framework"),
        ({"Framework": "PyTorch", "UpstreamAddr": "tcp://host"}, "UpstreamAddr"),
        ({"Framework": "PyTorch", "UpstreamPort": 9602}, "UpstreamPort"),
        ({"Framework": "PyTorch", "ServerRank": "x"}, "ServerRank"),
    ],
)
def test_wrong_settings_of_an_agent_of_callbacks_are_named(settings: dict, key: str) -> None:
    refusal(lambda: CallbackAgentConfig.load(settings, {"RANK": "0"}), key)


@pytest.mark.parametrize(
    ("value", "is_on"), [("on", True), ("off", False), ("ON", True), ("", False), (None, False)]
)
def test_the_patch_is_enabled_by_on_alone(value: str | None, is_on: bool) -> None:
    environment = {} if value is None else {"TASKD_PROCESS_ENABLE": value}
    assert config.is_patch_enabled(environment) is is_on


@pytest.mark.parametrize(
    ("value", "is_on"), [("on", True), ("off", False), ("ON", True), (" on ", True), ("Off", False)]
)
def test_the_manager_and_the_patch_read_the_switch_alike(value: str, is_on: bool) -> None:
    environment = {"TASKD_PROCESS_ENABLE": value}
    assert ManagerConfig.load({}, environment).is_enabled is is_on
    assert config.is_patch_enabled(environment) is is_on


# Not settings: what torch says to its processes, and what an agent hands to those it starts.
READERS_OF_OTHER_THINGS = (
    "taskd/agent/",
    "taskd/torchrun/",
    "taskd/worker/",
    "taskd/run.py",
    "taskd/chaos/__main__.py",  # the command of a user gets it as it is
    "taskd/python/adaptor/handler.py",  # whether anything of taskd is to be loaded
)


def test_settings_are_read_from_the_environment_here_alone() -> None:
    root = pathlib.Path(__file__).resolve().parents[2]
    readers = {
        path.relative_to(root).as_posix()
        for path in (root / "taskd").rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text(encoding="utf-8"))
    }
    assert "taskd/config/job.py" in readers
    others = {reader for reader in readers if not reader.startswith("taskd/config/")}
    assert not {reader for reader in others if not reader.startswith(READERS_OF_OTHER_THINGS)}
    for reader in others:
        found = (root / reader).read_text(encoding="utf-8")
        named = set(re.findall(r"os\.environ\.get\(\s*\"(\w+)\"", found))
        assert named <= {"MASTER_ADDR", "PYTHONFAULTHANDLER", "LC_CTYPE"}, reader


@pytest.mark.parametrize(
    ("version", "before", "added"),
    [
        ("2.10.0+cpu", {}, {"TORCH_FR_BUFFER_SIZE"}),
        ("2.8.0", {}, {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}),
        ("2.10.0", {"TORCH_FR_BUFFER_SIZE": "0"}, set()),
        ("2.7.1", {}, set()),
        ("2.13.0+cpu", {}, set()),
    ],
)
def test_torch_is_told_to_keep_collectives_where_it_does_not(
    version: str, before: dict[str, str], added: set[str]
) -> None:
    environment = dict(before)
    launcher.keep_collectives(version, environment)
    assert environment.keys() - before.keys() == added
    assert before.items() <= environment.items()


@pytest.mark.parametrize("key", ["MINDX_TASK_ID", "TASKD_HOST", "POD_IP", "TASKD_MANAGER_ADDR"])
def test_what_others_are_told_is_utf8(key: str) -> None:
    odd = {key: "job\udcff"}
    refusal(lambda: AgentConfig.load(odd), key, "udcff", "UTF-8")
    if key in {"MINDX_TASK_ID", "POD_IP"}:
        refusal(lambda: ManagerConfig.load({}, odd), key, "udcff", "UTF-8")


def test_a_path_may_have_any_bytes() -> None:
    odd = {"TASKD_LOG_PATH": "/log\udcff", "TASKD_CHECKPOINT_DIR": "/save\udcff"}
    assert LogConfig.load(odd).directory == pathlib.Path("/log\udcff")
    assert config.checkpoint_directory(None, odd) == pathlib.Path("/save\udcff")


def test_a_working_directory_that_was_deleted_keeps_its_name(tmp_path, monkeypatch):
    """Also one whose own name ends as /proc marks those that were deleted."""
    for name in ("job", "job (deleted)"):
        there = tmp_path / name
        there.mkdir()
        monkeypatch.chdir(there)
        assert config.working_directory() == str(there)
        there.rmdir()
        assert config.working_directory() == str(there)
        assert config.profiling_base({}, config.working_directory()).parent == there


def test_a_working_directory_on_a_lost_disk_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def stale():
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "getcwd", stale)
    assert config.working_directory() == str(tmp_path)


def test_a_working_directory_that_nothing_names_is_empty(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    (tmp_path / "job").rmdir()

    def no_proc(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", no_proc)
    assert config.working_directory() == ""
