"""The registration of handlers: which one is called when is told in `mindio_ttp.training`.

Each raises TypeError for what cannot be called. `ctx` is handed back to the handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindio_ttp import process
from mindio_ttp.arguments import function
from mindio_ttp.names import ReportState
from mindio_ttp.notices import warn_once
from mindio_ttp.reports import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

_ZIT = (
    "it is never called: a job that goes on with fewer nodes (elastic-training) does so with "
    "taskd.recoverable and taskd.ElasticSampler, not with handlers"
)


def _register(name: str, func: Callable[..., Any], ctx: Any) -> None:
    process.current().handlers.register(name, func, ctx)


def _register_in_vain(name: str, func: Callable[..., Any], ctx: Any, why: str) -> None:
    _register(name, func, ctx)
    warn_once(f"tft_register_{name}_handler", why)


def tft_register_stop_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(args, ctx): make a wait for the device raise, as the process is to leave its step."""
    _register("stop", func, ctx)


def tft_register_clean_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(is_uce_error, args, ctx): empty the queues of the device.

    It answers 0 (done), 1 (failed: the process is replaced) or 2 (done, and the memory of a rank
    with a memory fault is whole again).
    """
    _register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(fault_ranks, args, ctx): make the script's process groups again, on all ranks.

    The default group is there already. `fault_ranks`: those that will receive the state.
    """
    _register("rebuild", func, ctx)


def tft_register_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, need_rebuild, error_ranks, repair_info, args, ctx): send or receive the state.

    `repair_info`: repair_type (RT_SEND, RT_RECV_REPAIR, or RT_UCE_HIGHLEVEL with `need_rebuild`
    True), type, src and dst (one element for each pair of ranks and type of optimizer), rank_list
    (all ranks that send or receive, the same on all of them).
    """
    _register("repair", func, ctx)


def tft_register_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, args, ctx): put back what a step moves beside model and optimizer, on all ranks.

    The generators of torch, numpy and Python are put back already.
    """
    _register("rollback", func, ctx)


def tft_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, save_info, args, ctx): write the last checkpoint under a name for the time.

    Called on one rank of each part. `save_info`: type and ranks (all that write), per optimizer.
    The default group is broken; ranks that write can make a group among themselves by
    new_group(ranks, use_local_synchronization=True).
    """
    _register("save", func, ctx)


def tft_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, args): give the checkpoint its name. On one rank, when all have written theirs.

    With MINDIO_FOR_MINDSPORE it is func(step, ctx).
    """
    _register("rename", func, ctx)


def tft_register_exit_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(ctx). Not called."""
    _register_in_vain("exit", func, ctx, "it is never called: taskd ends processes itself")


def tft_register_stream_sync_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(). Not called."""
    why = "it is never called: training is not paused between steps"
    _register_in_vain("stream_sync", func, ctx, why)


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Not called."""
    _register_in_vain("zit_downgrade_rebuild", func, ctx, _ZIT)


def tft_register_zit_upgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Not called."""
    _register_in_vain("zit_upgrade_rebuild", func, ctx, _ZIT)


def tft_register_zit_upgrade_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Not called."""
    _register_in_vain("zit_upgrade_repair", func, ctx, _ZIT)


def tft_register_zit_upgrade_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Not called."""
    _register_in_vain("zit_upgrade_rollback", func, ctx, _ZIT)


def tft_register_decrypt_handler(decryptor: Callable[[str], str]) -> None:
    """Not called."""
    why = "it is never called: connections are taskd's, with a secret and no certificate"
    _register_in_vain("decrypt", decryptor, None, why)


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]
) -> None:
    """A RuntimeError whose text has `fault_pattern` in it is a report of `fault_type`.

    `fault_handle` is handed the text; what it returns is logged as the code of the error.

    Raises:
        ValueError: no pattern, or a type that is not the name of a ReportState.
        TypeError: `fault_handle` cannot be called.
    """
    if not isinstance(fault_pattern, str) or not fault_pattern:
        message = f"fault_pattern must be text, not {fault_pattern!r}"
        raise ValueError(message)
    if fault_type not in ReportState.__members__:
        message = (
            f"fault_type must be one of {', '.join(ReportState.__members__)}, not {fault_type!r}"
        )
        raise ValueError(message)
    handle = function("tft_register_exception_handler", fault_handle)
    process.current().rules.append(Rule(fault_pattern, ReportState[fault_type], handle))
