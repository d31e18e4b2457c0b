"""What MindCluster calls of MindIO TTP. The controller is taskd's manager, which nobody calls.

What is asked for here is answered with the documented failure where taskd's manager decides by
itself, and the log says so once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mindio_ttp import process
from mindio_ttp.arguments import MAX_WORLD, address, function, whole_number
from mindio_ttp.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

__all__ = [
    "tft_destroy_controller", "tft_init_controller", "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump", "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action", "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch", "tft_register_mindx_callback", "tft_start_controller",
]  # fmt: skip

_OK, _FAILED = 0, 1
_CALLBACKS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
_DECIDES = "taskd's manager decides by itself what is done about a fault (TASKD_RECOVER_STRATEGY)"
LOCAL_COPY = "there is none: a copy that is half written is repaired from another rank"
TLS = "connections are taskd's: TASKD_SECRET encrypts them (docs/security.md)"


def tft_init_controller(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_arf: bool = False,  # noqa: ARG001
    enable_zit: bool = False,  # noqa: ARG001
) -> None:
    """Note that the job wants a controller. taskd's manager is it; it is there already.

    `rank`: -1 to `world_size` - 1. What is recovered how is said by TASKD_RECOVER_STRATEGY.

    Raises:
        ValueError: a number out of its range.
    """
    whole_number("world_size", world_size, 1, MAX_WORLD)
    whole_number("rank", rank, -1, world_size - 1)
    if enable_local_copy:
        warn_once("enable_local_copy", LOCAL_COPY)
    process.current().has_controller = True
    log.info("taskd's manager is the controller of %d ranks", world_size)


def tft_start_controller(
    bind_ip: str,
    port: int,
    enable_tls: bool = True,
    tls_info: str = "",  # noqa: ARG001
) -> None:
    """Check the arguments. Nothing listens there: the manager has an address of its own.

    Raises:
        ValueError: an address or a port (1024 to 65535) that cannot be.
        RuntimeError: it was not initialised.
    """
    address("bind_ip", bind_ip)
    whole_number("port", port, 1024, 65535)
    if enable_tls:
        warn_once("enable_tls", TLS)
    if not process.current().has_controller:
        message = "call tft_init_controller before tft_start_controller"
        raise RuntimeError(message)


def tft_destroy_controller() -> None:
    """Forget it. The manager ends with the job."""
    process.current().has_controller = False


def tft_notify_controller_dump() -> int:
    """Have the job saved, and ended. 0: that is ordered; 1: it cannot be, from here.

    It can in a training process of a job that may be dumped (TASKD_RECOVER_STRATEGY). From
    elsewhere send SIGTERM to torchrun.
    """
    if _order_dump():
        return _OK
    warn_once(
        "tft_notify_controller_dump",
        "this is no training process of a job that may be dumped: send SIGTERM to torchrun, with "
        "dump in TASKD_RECOVER_STRATEGY",
    )
    return _FAILED


def _order_dump() -> bool:
    try:
        from taskd.core.events import WorkerDraining  # noqa: PLC0415
        from taskd.worker.life import current  # noqa: PLC0415
    except ImportError as error:
        log.info("no training process: %s", error)
        return False
    life = current()
    if life is None or life.saving.grace_s is None:
        return False
    life.supervisor.tell(WorkerDraining, "tft_notify_controller_dump")
    return True


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int],  # noqa: ARG001
    stop_type: str = "stop",  # noqa: ARG001
    timeout: int | None = None,  # noqa: ARG001
) -> int:
    """Not done: 1."""
    warn_once("tft_notify_controller_stop_train", _DECIDES)
    return _FAILED


def tft_notify_controller_on_global_rank(
    fault_ranks: dict[int, int],  # noqa: ARG001
    time: int = 1,  # noqa: ARG001
) -> int:
    """Not done: 1."""
    warn_once("tft_notify_controller_on_global_rank", _DECIDES)
    return _FAILED


def tft_notify_controller_prepare_action(
    action: str,  # noqa: ARG001
    fault_ranks: dict[int, int] | None = None,  # noqa: ARG001
) -> int:
    """Not done: 1. There is no hot switch: a spare takes the place of a node that is lost."""
    warn_once(
        "tft_notify_controller_prepare_action",
        "there is no hot switch: a spare (TASKD_SPARE) takes the place of a node that is lost",
    )
    return _FAILED


def tft_notify_controller_change_strategy(
    strategy: str,  # noqa: ARG001
    params: str = "",  # noqa: ARG001
) -> int:
    """Not done: 1."""
    warn_once("tft_notify_controller_change_strategy", _DECIDES)
    return _FAILED


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Not done: 1. What happens is in taskd's recoveries.jsonl.

    Raises:
        TypeError: `func` cannot be called.
    """
    function("tft_register_mindx_callback", func)
    why = f"{_DECIDES} and writes it to recoveries.jsonl; nothing is called"
    if action not in _CALLBACKS:
        why = f"{action!r} is none of {', '.join(_CALLBACKS)}"
    warn_once("tft_register_mindx_callback", why)
    return _FAILED


def tft_query_high_availability_switch() -> bool:
    """Whether a processor of this process is started."""
    processor = process.current().processor
    return processor is not None and processor.is_started
