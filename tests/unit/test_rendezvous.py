"""`--rdzv-backend=taskd`: which of torch's rendezvous that is, and what --rdzv-conf may say."""

from __future__ import annotations

import uuid

import pytest
from torch.distributed.launcher.api import LaunchConfig

from taskd.config.rendezvous import take_settings
from taskd.errors import ConfigError
from taskd.torchrun.rendezvous import resolved


def launch(**given) -> LaunchConfig:
    one_node = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "rdzv_backend": "taskd"}
    return resolved(LaunchConfig(**(one_node | given)))


def test_one_node_without_an_endpoint_is_as_with_standalone() -> None:
    made = launch(run_id="none")
    assert (made.rdzv_backend, made.rdzv_endpoint) == ("c10d", "localhost:0")
    assert uuid.UUID(made.run_id)
    assert launch(run_id="mine").run_id == "mine"


def test_an_endpoint_means_c10d_and_with_a_rank_static() -> None:
    given = {"rdzv_endpoint": "10.0.0.1:2222", "max_nodes": 2, "run_id": "none"}
    made = launch(**given)
    assert (made.rdzv_backend, made.rdzv_endpoint) == ("c10d", "10.0.0.1:2222")
    assert made.run_id == "none", "all nodes must say the same"
    made = launch(**given, rdzv_configs={"rank": "1"})
    assert (made.rdzv_backend, made.rdzv_configs["rank"]) == ("static", 1)
    with pytest.raises(ConfigError, match="rank='first' is not accepted"):
        launch(**given, rdzv_configs={"rank": "first"})


def test_several_nodes_without_an_endpoint_are_refused() -> None:
    with pytest.raises(ConfigError, match="with 2 nodes needs --rdzv-endpoint=HOST:PORT"):
        launch(max_nodes=2)


def test_another_backend_is_left_alone() -> None:
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_configs={"fault_timeout": "3"})
    assert resolved(config) is config


def test_settings_win_over_the_environment_and_torch_keeps_its_own() -> None:
    environment = {"TASKD_FAULT_TIMEOUT": "30"}
    given = {
        "fault_timeout": "10",
        "manager": "off",
        "recover_strategy": "recover-in-place+dump",
        "timeout": 900,
        "join_timeout": "60",
    }
    assert take_settings(given, environment) == ({"timeout": 900, "join_timeout": "60"}, [])
    assert environment == {
        "TASKD_FAULT_TIMEOUT": "10",
        "TASKD_MANAGER": "off",
        "TASKD_RECOVER_STRATEGY": "recover-in-place,dump",
    }


def test_unknown_keys_are_told_with_the_one_that_was_meant(caplog) -> None:
    environment: dict[str, str] = {}
    rest, unknown = take_settings(
        {"fault_time_out": "1", "process_enable": "on", "xyz": "1"}, environment
    )
    assert unknown == [("fault_time_out", "fault_timeout"), ("process_enable", ""), ("xyz", "")]
    assert list(rest) == ["fault_time_out", "process_enable", "xyz"]
    assert environment == {}
    launch(rdzv_configs={"hang_flor": "1"})
    assert "neither taskd nor torch knows hang_flor; did you mean hang_floor?" in caplog.text
