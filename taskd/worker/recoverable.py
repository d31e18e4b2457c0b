"""`taskd.recoverable`.

Run a function, unwind it on a fault, wait, enter it again in the same process.

The loop of the main thread. What it reports and waits for goes through the runtime; what happens to
tensors is `taskd.worker.restore.parking`. Outside a taskd job the decorator returns what the function
returns and does nothing else.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from taskd.core import events
from taskd.errors import Interrupted, StateError
from taskd.native.black_box import Phase
from taskd.worker import life as life_module
from taskd.worker.exceptions.text import drop_frames
from taskd.worker.process import runtime as runtime_module
from taskd.worker.process.runtime import Runtime, Where

if TYPE_CHECKING:
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def recoverable(function: F) -> F:
    """Make `function` survive faults of other ranks: after one it is entered again in this process.

    It returns when the function has returned on every rank, so that a death at the very end can
    still be healed. Nothing is done outside a taskd job. An exception other than
    `taskd.Interrupted` is retried once on all ranks; if it comes back at the same step, the job
    ends with its traceback.

    Raises:
        StateError: called from another thread than the main one, or within itself.
    """
    if not callable(function):
        message = "taskd.recoverable takes a function: write @taskd.recoverable without parentheses"
        raise TypeError(message)
    runtime = runtime_module.start_from_environment()
    if runtime is not None:
        runtime.declare()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        present = runtime_module.current()
        if present is None:
            return _run_alone(functools.partial(function, *args, **kwargs))
        if threading.current_thread() is not threading.main_thread():
            message = (
                f"{function.__qualname__} is recoverable: call it from the main thread, "
                "which taskd interrupts"
            )
            raise StateError(message)
        if present.life.in_recoverable:
            message = (
                f"{function.__qualname__} is recoverable and was called within a "
                "recoverable "
                "function: decorate the outer one only"
            )
            raise StateError(message)
        if present.released:
            log.warning(
                "rank %d: %s runs without recovery: a recoverable function has already "
                "returned on all ranks, "
                "and a process has one; put all of the training "
                "into it",
                present.life.rank,
                function.__qualname__,
            )
            life_module.set_current(None)  # a TrainState in there counts, and no more
            return function(*args, **kwargs)
        return _run(present, functools.partial(function, *args, **kwargs))

    return wrapper  # type: ignore[return-value]


def _run_alone(call: Callable[[], Any]) -> Any:
    """Enter once: nobody would call for a second time.

    In a job that has lost its manager, TrainStates still read and write checkpoints.
    """
    life = life_module.current()
    if life is None or life.in_recoverable:
        return call()
    life.in_recoverable = True
    try:
        result = call()
        if life.periodic is not None:
            life.periodic.wait()
    finally:
        life.in_recoverable = False
        life_module.set_current(None)  # a TrainState of a second function counts, and no more
    return result


def _run(runtime: Runtime, call: Callable[[], Any]) -> Any:
    """Enter, and enter again, until every rank has returned."""
    version: int | None = None
    clean, reason = True, ""
    _rejoin(runtime, version=None, clean=True)
    while True:
        result, error = _enter(runtime, call)
        version, clean, reason = _park(runtime)
        if error is None:
            if _await_release(runtime, version):
                return result
        elif not isinstance(error, Interrupted):
            runtime.await_verdict(error, clean=clean)
        _rejoin(
            runtime,
            version=version,
            clean=clean,
            reason=reason,
            meanwhile=functools.partial(_let_go, error),
        )
        error = None


def _rejoin(runtime: Runtime, **held: Any) -> None:
    """Wait at the gate if a recovery is going on, and make the default group again if it was made outside the function."""
    while runtime.gate(**held):
        if runtime.outer_group.remake():
            return


def _enter(runtime: Runtime, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """One entry into the user's function: its result, or what ended it.

    SystemExit and KeyboardInterrupt pass through.
    """
    life = runtime.life
    with runtime.condition:
        interrupted = runtime.must_gate
        runtime.where = Where.WAITING if interrupted else Where.INSIDE
    if interrupted:
        return None, Interrupted("interrupted before the function was entered")
    runtime.enter()
    # The signal handler raises wherever the main thread is while `in_recoverable` is set: also in
    # the handlers of the inner try. The outer one makes sure that this cannot leave the loop.
    try:
        outcome = _call(life, call)
    except Interrupted as interrupt:
        outcome = None, interrupt
    finally:
        life.in_recoverable = False
    with runtime.condition:
        runtime.where = Where.WAITING
    life.pending = None
    return outcome


def _call(life: Life, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        life.in_recoverable = True
        if life.pending is not None:  # it came between INSIDE and the line above
            return None, Interrupted(life.pending)
        result = call()
        if life.periodic is not None:
            life.periodic.wait()
    except Interrupted as interrupt:
        return None, interrupt
    except Exception as error:  # noqa: BLE001
        return None, error
    return result, None


def _park(runtime: Runtime) -> tuple[int | None, bool, str]:
    from taskd.worker.restore.parking import park_all  # noqa: PLC0415

    report = park_all(runtime.life)
    runtime.life.held = False
    return report.version, report.clean, report.reason


def _await_release(runtime: Runtime, version: int | None) -> bool:
    """The function returned here. True: it has on all ranks.

    False: a recovery needs us once more.
    """
    runtime.mark(Phase.RETURNED)
    with runtime.condition:
        if runtime.must_gate:
            return False
        generation = runtime.target_generation
    runtime.send(
        events.WorkerReturned(
            **runtime.identity("returned"), generation=generation, version=version
        )
    )
    with runtime.condition:
        while not runtime.released:
            if runtime.must_gate:
                return False
            runtime.raise_if_over()
            runtime.condition.wait()
    runtime.where = Where.OUTSIDE
    return True


def _let_go(error: BaseException | None) -> None:
    """Free what the frames of the old entry hold: loaders with their processes, DDP, the old model.

    Also what is in circles, as FSDP2's groups of parameters are, with their process groups: Python
    looks for those in old age only, after hundreds of recoveries, and then it would free groups
    wherever the main thread is. It takes less time than the replacement's start.
    """
    drop_frames(error)
    gc.collect()
