"""The processor, the steps of the optimizer, and the decorator."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mindio_ttp import devices, process, replicas
from mindio_ttp.arguments import MAX_STEP, MAX_WORLD, address, function, whole_number
from mindio_ttp.controller_ttp import LOCAL_COPY, TLS, tft_destroy_controller
from mindio_ttp.notices import warn_once
from mindio_ttp.process import Prepared, Processor

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")  # their training sets the arguments of handlers itself


# ---------------------------------------------------------------------- the processor


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",  # noqa: ARG001
    enable_uce: bool = True,
    enable_arf: bool = False,  # noqa: ARG001
    enable_zit: bool = False,  # noqa: ARG001
) -> None:
    """Note who this process is. `rank`: 0 to `world_size` - 1, as in the default process group.

    `enable_uce`: exceptions that name a fault of the device's memory are known by their text. What
    is recovered how is said by TASKD_RECOVER_STRATEGY, not by the other switches.

    Raises:
        ValueError: a number out of its range.
    """
    whole_number("world_size", world_size, 1, MAX_WORLD)
    whole_number("rank", rank, 0, world_size - 1)
    if enable_local_copy:
        warn_once("enable_local_copy", LOCAL_COPY)
    if enable_tls:
        warn_once("enable_tls", TLS)
    record = process.current()
    record.processor = Processor(rank, world_size, bool(enable_uce))
    record.devices = devices.current()


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """From here on the process counts as one that can be recovered. It connects to nobody.

    The connection to taskd's manager is that of the agent in torchrun, which is there already.

    Raises:
        ValueError: an address or a port (1024 to 65535) that cannot be.
        RuntimeError: it was not initialised.
    """
    address("master_ip", master_ip)
    whole_number("port", port, 1024, 65535)
    if local_ip:
        address("local_ip", local_ip)
    processor = process.current().processor
    if processor is None:
        message = "call tft_init_processor before tft_start_processor"
        raise RuntimeError(message)
    processor.is_started = True


def tft_destroy_processor() -> None:
    """From here on nothing is recovered: a fault restarts all processes, as without handlers."""
    record = process.current()
    record.processor = None
    if record.state is not None:
        record.state.refuse("tft_destroy_processor was called")


def get_device() -> int | None:
    """The number of the device that this process works on, for handlers; None: there is none.

    As it was at `tft_init_processor`; the script may have begun to use one since.
    """
    known = process.current().devices or devices.current()
    return next(iter(known.values()), None)


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Declare who holds the same optimizer state as `rank`, for ATTENTION and then MOE.

    An element: rank_list, a data parallel group of L ranks; replica_cnt, how many whole copies they
    hold together (-1: each holds one), so that the ranks at i and i + L / replica_cnt hold the same
    part; replica_shift, which changes nothing. Whether the ranks' declarations fit together is seen
    when all have entered the decorated function.

    Raises:
        ValueError: not of this form.
    """
    whole_number("rank", rank, 0, MAX_WORLD - 1)
    process.current().replicas = replicas.parse(replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Check the arguments: it serves the downgrade, which is not done by handlers here.

    Raises:
        ValueError: no rank, or no list of ranks.
    """
    whole_number("rank", rank, 0, MAX_WORLD - 1)
    if not isinstance(dp_rank_list, list) or not dp_rank_list:
        message = f"dp_rank_list must be a list of ranks, not {dp_rank_list!r}"
        raise ValueError(message)
    for other in dp_rank_list:
        whole_number("a rank of dp_rank_list", other, 0, MAX_WORLD - 1)
    warn_once("tft_set_dp_group_info", "it has no effect: no handler is called for a downgrade")


# ---------------------------------------------------------------------- steps


def tft_start_updating_os(backup_step: int = -1) -> None:
    """The optimizer begins to write: until `tft_end_updating_os` no fault elsewhere interrupts it.

    Where the replicas hold parts, all ranks vote here: a small all-reduce of the default group.

    Raises:
        ValueError: `backup_step` is less than -1, or no number.
        taskd.Interrupted: a recovery waits for this process; let it pass.
    """
    whole_number("backup_step", backup_step, -1, MAX_STEP)
    record = process.current()
    if record.is_preparing:
        warn_once(
            "tft_is_reboot_node",
            "it was True, and the function has begun a step without raising 'ARF FINISH'",
        )
        raise Prepared
    if record.state is None:
        warn_once("tft_start_updating_os", _no_state())
        return
    if record.is_updating:
        warn_once(
            "tft_start_updating_os",
            "it was called twice without tft_end_updating_os: call both once in a training step, "
            "around all optimizers",
        )
        return
    record.state.begin_update()
    record.is_updating = True


def tft_start_copy_os() -> None:
    """Nothing to be done: there is no local copy."""
    warn_once("tft_start_copy_os", LOCAL_COPY)


def tft_end_updating_os(step: int) -> None:
    """The optimizer has written: `step`, counted from 1, is finished, and can be gone on from.

    Right behind the optimizer, before collectives: one that breaks before it costs the step.

    Raises:
        ValueError: `step` is not positive, or no number.
        taskd.Interrupted: a recovery waits for this process; let it pass.
    """
    whole_number("step", step, 1, MAX_STEP)
    record = process.current()
    if record.state is None:
        warn_once("tft_end_updating_os", _no_state())
        return
    if not record.is_updating:
        warn_once(
            "tft_end_updating_os",
            f"step {step} has ended and not begun: call tft_start_updating_os before the optimizer "
            "writes; as it is, a fault of one process restarts all of them",
        )
        # Nothing holds interrupts off while the optimizer writes, and nothing tells of a copy that
        # one has left half written. The next step is not begun either, in this entry or another.
        record.refusal = "a step ended without tft_start_updating_os"
        record.state.refuse(record.refusal)
    elif step <= record.state.step:
        warn_once(
            "tft_end_updating_os",
            f"step {step} has ended behind step {record.state.step}: steps grow, one in each "
            "training step; the newest of them is gone on from",
        )
    record.is_updating = False
    record.state.end_update(step)


def tft_pause_train(cur_step: int) -> None:
    """At the end of a step. Returns at once: nothing pauses a training here.

    Raises:
        ValueError: `cur_step` is negative, or no number.
    """
    whole_number("cur_step", cur_step, 0, MAX_STEP)


def _no_state() -> str:
    if process.current().processor is None:
        return "there is no processor (tft_init_processor): the step is not counted"
    return "this is not within the decorated function of a taskd job: the step is not counted"


# ---------------------------------------------------------------------- the function


def tft_exception_handler(func: F) -> F:
    """Make the training function `func` survive faults of other ranks, by the handlers.

    It is entered again after one, with the same arguments. It is called from the main thread,
    behind init_process_group. Outside a taskd job it is called, and no more.

    Raises:
        TypeError: `func` cannot be called.
    """
    function("tft_exception_handler", func)
    try:
        from mindio_ttp.training import protect  # noqa: PLC0415
    except ImportError as error:  # no torch
        warn_once("tft_exception_handler", f"nothing is recovered: {error}")
        return func
    protected = protect(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = protected(*args, **kwargs)
        tft_destroy_processor()
        tft_destroy_controller()
        return result

    return wrapper  # type: ignore[return-value]


def tft_set_step_args(args: Any) -> None:
    """What is handed to every handler in place of the function's positional arguments."""
    record = process.current()
    if args is None:
        warn_once("tft_set_step_args", "None is no set of arguments: nothing has changed")
    elif record.framework in _FRAMEWORKS:
        warn_once("tft_set_step_args", f"{record.framework} hands over the function's arguments")
    else:
        record.step_args = args


def set_mindio_export_version(framework_type: str) -> None:
    """Say which framework this is: handlers are then handed the function's arguments.

    Raises:
        ValueError: neither MindSpeed nor MindSpeed-LLM.
    """
    if framework_type not in _FRAMEWORKS:
        message = f"framework_type must be one of {', '.join(_FRAMEWORKS)}, not {framework_type!r}"
        raise ValueError(message)
    record = process.current()
    record.framework, record.step_args = framework_type, None
    log.info("the framework is %s", framework_type)


def get_mindio_export_version() -> str | None:
    """What `set_mindio_export_version` was told."""
    return process.current().framework
