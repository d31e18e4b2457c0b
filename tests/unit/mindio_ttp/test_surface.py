"""The names that scripts import, what they take, and what they answer. No torch, no job."""

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from mindio_ttp import controller_ttp, framework_ttp, utils
from mindio_ttp.framework_ttp import Action, OptimizerType, RepairType, ReportState

ROOT = Path(__file__).resolve().parents[3]

# The parameters that a call by position or by name relies on.
FRAMEWORK = {
    "tft_init_controller": "rank world_size enable_local_copy enable_arf=False enable_zit=False",
    "tft_start_controller": "bind_ip port enable_tls=True tls_info=''",
    "tft_destroy_controller": "",
    "tft_init_processor": (
        "rank world_size enable_local_copy enable_tls=True tls_info='' enable_uce=True "
        "enable_arf=False enable_zit=False"
    ),
    "tft_start_processor": "master_ip port local_ip=''",
    "tft_destroy_processor": "",
    "tft_start_updating_os": "backup_step=-1",
    "tft_start_copy_os": "",
    "tft_end_updating_os": "step",
    "tft_set_optimizer_replica": "rank replica_info",
    "tft_set_dp_group_info": "rank dp_rank_list",
    "tft_exception_handler": "func",
    "tft_set_step_args": "args",
    "tft_report_error": "error_type error_code=''",
    "tft_wait_next_action": "",
    "tft_get_repair_step": "",
    "tft_get_repair_type": "",
    "tft_is_reboot_node": "",
    "tft_get_reboot_type": "",
    "tft_reset_limit_step": "",
    "tft_report_load_ckpt_step": "step",
    "tft_pause_train": "cur_step",
    "tft_can_do_uce_repair": "hbm_error_time start_time=None end_time=None",
    "tft_register_decrypt_handler": "decryptor",
    "tft_register_exception_handler": "fault_pattern fault_type fault_handle",
    "set_mindio_export_version": "framework_type",
    **{
        f"tft_register_{name}_handler": "func ctx=None"
        for name in (
            "stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt", "rename", "exit",
            "stream_sync", "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair",
            "zit_upgrade_rollback",
        )
    },
}  # fmt: skip
CONTROLLER = {
    "tft_notify_controller_dump": "",
    "tft_notify_controller_stop_train": "fault_ranks stop_type='stop' timeout=None",
    "tft_notify_controller_on_global_rank": "fault_ranks time=1",
    "tft_notify_controller_prepare_action": "action fault_ranks=None",
    "tft_notify_controller_change_strategy": "strategy params=''",
    "tft_register_mindx_callback": "action func",
    "tft_query_high_availability_switch": "",
    **{name: FRAMEWORK[name] for name in FRAMEWORK if name.endswith("_controller")},
}
UTILS = {
    "tft_set_update_start_time": "start_time=None",
    "tft_set_update_end_time": "end_time=None",
    "tft_can_do_uce_repair": FRAMEWORK["tft_can_do_uce_repair"],
}


def parameters_of(function):
    return " ".join(
        name if one.default is inspect.Parameter.empty else f"{name}={one.default!r}"
        for name, one in inspect.signature(function).parameters.items()
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [(framework_ttp, FRAMEWORK), (controller_ttp, CONTROLLER), (utils, UTILS)],
    ids=["framework_ttp", "controller_ttp", "utils"],
)
def test_each_name_takes_what_its_users_give_it(module, names):
    assert {name: parameters_of(getattr(module, name)) for name in names} == names
    assert set(names) <= set(module.__all__)


def test_the_decorators_module_has_all_names_and_the_device():
    """Handlers of MindSpeed-LLM import some of them from there."""
    module = framework_ttp.ttp_decorator
    assert set(framework_ttp.__all__) < set(module.__all__)
    for name in framework_ttp.__all__:
        assert getattr(module, name) is getattr(framework_ttp, name)
    assert module.get_device() is None


def test_the_enumerations_have_their_members():
    assert [one.name for one in OptimizerType] == ["ATTENTION", "MOE"]
    assert (Action.RETRY, Action.EXIT, OptimizerType.MOE) == (0, 1, 1)
    assert {one.name for one in ReportState} == {
        "RS_NORMAL", "RS_RETRY", "RS_UCE", "RS_UCE_CORRUPTED", "RS_HCCL_FAILED", "RS_INIT_FINISH",
        "RS_PREREPAIR_FINISH", "RS_STEP_FINISH", "RS_UNKNOWN",
    }  # fmt: skip
    assert {one.name for one in RepairType} == {
        "RT_SEND", "RT_UCE_HIGHLEVEL", "RT_UCE_LOWLEVEL", "RT_RECV_REPAIR", "RT_ROLLBACK",
        "RT_LOAD_CKPT", "RT_LOAD_REBUILD",
    }  # fmt: skip


def test_it_is_imported_without_torch_and_zmq_and_the_decorator_lets_the_function_be():
    """What a preloaded image or a manager does that has no torch."""
    code = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "zmq"):
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Without())
from mindio_ttp import controller_ttp, framework_ttp, utils

@framework_ttp.tft_exception_handler
def train(word):
    return word * 2

assert train("ab") == "abab"
assert framework_ttp.tft_is_reboot_node() is False
assert controller_ttp.tft_notify_controller_dump() == 1
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/packages/mindio_ttp", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("tft_exception_handler: nothing is recovered") == 1


@pytest.mark.parametrize(("call", "answer"), [
    (controller_ttp.tft_notify_controller_dump, 1),
    (lambda: controller_ttp.tft_notify_controller_stop_train({1: 1}), 1),
    (lambda: controller_ttp.tft_notify_controller_on_global_rank({1: 1}, 5), 1),
    (lambda: controller_ttp.tft_notify_controller_prepare_action("hot switch"), 1),
    (lambda: controller_ttp.tft_notify_controller_change_strategy("retry"), 1),
    (lambda: controller_ttp.tft_register_mindx_callback("report_result", print), 1),
    (framework_ttp.tft_wait_next_action, 1),
])  # fmt: skip
def test_what_cannot_be_done_answers_failure_and_says_why_once(caplog, call, answer):
    with caplog.at_level(logging.WARNING):
        assert [call(), call()] == [answer, answer]
    assert len(caplog.records) == 1
    assert len(caplog.messages[0]) > 60


@pytest.mark.parametrize("call", [
    lambda: framework_ttp.tft_register_exit_handler(print),
    lambda: framework_ttp.tft_register_stream_sync_handler(print),
    lambda: framework_ttp.tft_register_zit_downgrade_rebuild_handler(print),
    lambda: framework_ttp.tft_register_zit_upgrade_rebuild_handler(print),
    lambda: framework_ttp.tft_register_zit_upgrade_repair_handler(print),
    lambda: framework_ttp.tft_register_zit_upgrade_rollback_handler(print),
    lambda: framework_ttp.tft_register_decrypt_handler(print),
    lambda: framework_ttp.tft_set_dp_group_info(0, [0, 1]),
    framework_ttp.tft_start_copy_os,
    lambda: framework_ttp.tft_report_load_ckpt_step(5),
    lambda: framework_ttp.tft_init_processor(0, 2, True, False),
    lambda: framework_ttp.tft_init_processor(0, 2, False),  # TLS, by default
    lambda: framework_ttp.tft_set_step_args(None),
])  # fmt: skip
def test_what_is_without_effect_says_so_once(caplog, call):
    with caplog.at_level(logging.WARNING):
        assert [call(), call()] == [None, None]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: framework_ttp.tft_init_processor(2, 2, False), ValueError, "rank must be .* 0 to 1"),
    (lambda: framework_ttp.tft_init_processor("0", 2, False), ValueError, "whole number"),
    (lambda: framework_ttp.tft_init_processor(0, 0, False), ValueError, "world_size"),
    (lambda: framework_ttp.tft_init_controller(-2, 2, False), ValueError, "-1 to 1"),
    (lambda: framework_ttp.tft_start_controller("0.0.0.0", 8000), ValueError, "bind_ip"),
    (lambda: framework_ttp.tft_start_controller("host", 80), ValueError, "1024 to 65535"),
    (lambda: framework_ttp.tft_start_controller("host", 8000), RuntimeError, "tft_init_controller"),
    (lambda: framework_ttp.tft_start_processor("host", 8000), RuntimeError, "tft_init_processor"),
    (lambda: framework_ttp.tft_start_processor("", 8000), ValueError, "master_ip"),
    (lambda: framework_ttp.tft_end_updating_os(0), ValueError, "step must be"),
    (lambda: framework_ttp.tft_start_updating_os(-2), ValueError, "backup_step"),
    (lambda: framework_ttp.tft_pause_train(-1), ValueError, "cur_step"),
    (lambda: framework_ttp.tft_exception_handler("train"), TypeError, "takes a function"),
    (lambda: framework_ttp.tft_register_repair_handler(None), TypeError, "the repair handler"),
    (lambda: framework_ttp.tft_register_exception_handler("x", "RS_NONE", str), ValueError,
     "fault_type"),
    (lambda: framework_ttp.tft_register_exception_handler("", "RS_UCE", str), ValueError, "text"),
    (lambda: framework_ttp.tft_report_error(77), ValueError, "77"),
    (lambda: framework_ttp.tft_set_optimizer_replica(0, []), ValueError, "one or two dicts"),
    (lambda: framework_ttp.tft_set_optimizer_replica(0, [{"rank_list": [0]}]), ValueError,
     "replica_cnt"),
    (lambda: framework_ttp.tft_set_optimizer_replica(
        0, [{"rank_list": "0", "replica_cnt": 1, "replica_shift": 0}]), ValueError, "rank_list"),
    (lambda: framework_ttp.tft_set_dp_group_info(0, []), ValueError, "dp_rank_list"),
    (lambda: framework_ttp.set_mindio_export_version("other"), ValueError, "MindSpeed"),
    (lambda: controller_ttp.tft_register_mindx_callback("report_result", 5), TypeError, "function"),
])  # fmt: skip
def test_what_is_out_of_its_range_is_refused_with_what_is_accepted(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_switch_tells_of_a_processor_that_is_started(record):
    assert controller_ttp.tft_query_high_availability_switch() is False
    framework_ttp.tft_init_processor(1, 2, False, False)
    assert controller_ttp.tft_query_high_availability_switch() is False
    framework_ttp.tft_start_processor("127.0.0.1", 8000, "10.0.0.1")
    assert controller_ttp.tft_query_high_availability_switch() is True
    framework_ttp.tft_destroy_processor()
    assert controller_ttp.tft_query_high_availability_switch() is False


def test_the_answers_of_a_process_that_was_never_hurt():
    assert framework_ttp.tft_is_reboot_node() is False
    assert framework_ttp.tft_get_reboot_type() == "arf"
    assert framework_ttp.tft_get_repair_step() == 0
    assert framework_ttp.tft_get_repair_type() == "unknow"
    framework_ttp.set_mindio_export_version("MindSpeed-LLM")
    assert framework_ttp.ttp_decorator.get_mindio_export_version() == "MindSpeed-LLM"
    framework_ttp.tft_reset_limit_step()
    framework_ttp.tft_pause_train(5)


@pytest.mark.parametrize(("times", "step", "error_time", "can"), [
    ((None, None), 5, 100, False),
    ((10, None), 5, 100, False),
    ((10, 20), 0, 100, False),
    ((10, 20), 5, 9, False),
    ((10, 20), 5, 10, True),
    ((10, 20), 5, 20, True),
    ((10, 20), 5, 21, True),
])  # fmt: skip
def test_a_memory_fault_can_be_repaired_from_the_update_on(steps, times, step, error_time, can):
    steps.step = step
    utils.tft_set_update_start_time(times[0])
    utils.tft_set_update_end_time(times[1])
    assert utils.tft_can_do_uce_repair(error_time) is can
    utils.tft_set_update_start_time()
    utils.tft_set_update_end_time()
    assert utils.tft_can_do_uce_repair(error_time, *times) is can
