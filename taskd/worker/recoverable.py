"""`taskd.recoverable`: run a function, unwind it on a fault, wait, enter it again.

The loop of the main thread. What it reports and waits for goes through the runtime; what happens to
tensors is `taskd.worker.restore.parking`. Outside a taskd job the decorator returns what the
function returns and does nothing else.
"""

import functools
import gc
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from taskd.errors import Interrupted, StateError
from taskd.worker.exceptions.text import drop_frames
from taskd.worker.life import current
from taskd.worker.process import runtime as runtime_module
from taskd.worker.process.handlers import Handlers
from taskd.worker.process.interrupt import forget
from taskd.worker.process.orders import Where
from taskd.worker.process.runtime import Runtime

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def recoverable(function: F) -> F:
    """Make `function` survive faults of other ranks: after one it is entered again in this process.

    It returns when the function has returned on every rank, so that a death at the very end can
    still be healed. Nothing is done outside a taskd job. An exception other than
    `taskd.Interrupted` is retried on all ranks. If it comes back at the same step, the process that
    raised it is replaced; if the new one raises it again, the job ends with its traceback.

    Raises:
        TypeError: `function` is none, or a call of it does not run it (`async def`, `yield`).
        StateError: called from another thread than the main one, or within itself.
    """
    if not callable(function):
        message = "taskd.recoverable takes a function: write @taskd.recoverable without parentheses"
        raise TypeError(message)
    _refuse_deferred(function)
    runtime = runtime_module.start_from_environment()
    if runtime is not None:
        runtime.declare()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        present = runtime_module.current()
        call = functools.partial(function, *args, **kwargs)
        if present is None:
            return _run_alone(call)
        if threading.current_thread() is not threading.main_thread():
            message = (
                f"{function.__qualname__} is recoverable: call it from the main thread, "
                "which taskd interrupts"
            )
            raise StateError(message)
        life = present.life
        if life.interrupts.in_recoverable:
            message = (
                f"{function.__qualname__} is recoverable and was called within a recoverable "
                "function: decorate the outer one only"
            )
            raise StateError(message)
        if present.orders.released:
            log.warning(
                "rank %d: %s runs without recovery: a recoverable function has already "
                "returned on all ranks, and a process has one; put all of the training into it",
                life.rank,
                function.__qualname__,
            )
            life.is_retired = True  # a TrainState in there counts, and no more
            return call()
        return _run(present, call)

    return wrapper  # type: ignore[return-value]


def _refuse_deferred(function: Callable[..., Any]) -> None:
    """Raises TypeError: what a call returns would run outside, after the function has returned."""
    kinds: dict[Callable[[object], bool], str] = {
        inspect.iscoroutinefunction: "an async function: decorate one that calls asyncio.run(...)",
        inspect.isasyncgenfunction: "an async generator: decorate one that calls asyncio.run(...)",
        inspect.isgeneratorfunction: "a generator function: decorate the one that loops over it",
    }
    for is_of_kind, what in kinds.items():
        # an object that is called like a function, too
        if is_of_kind(function) or is_of_kind(getattr(function, "__call__", None)):  # noqa: B004
            name = getattr(function, "__qualname__", repr(function))
            message = f"taskd.recoverable: {name} is {what}; a call of it runs nothing of its body"
            raise TypeError(message)


def _run_alone(call: Callable[[], Any]) -> Any:
    """Enter once: nobody would call for a second time.

    In a job that has lost its manager, TrainStates still read and write checkpoints.
    """
    life = current()
    if life is None or life.interrupts.in_recoverable:
        return call()
    life.interrupts.in_recoverable = True
    try:
        result = call()
        if life.saving.periodic is not None:
            life.saving.periodic.wait()
    finally:
        life.interrupts.in_recoverable = False
        life.is_retired = True  # a TrainState of a second function counts, and no more
    return result


def _run(runtime: Runtime, call: Callable[[], Any]) -> Any:
    """Enter, and enter again, until every rank has returned."""
    handlers = Handlers(runtime.life.rank)
    handlers.replace()
    try:
        return _run_entries(runtime, call, handlers)
    finally:
        handlers.put_back()


def _run_entries(runtime: Runtime, call: Callable[[], Any], handlers: Handlers) -> Any:
    from taskd.worker.restore.parking import park_all  # noqa: PLC0415

    _rejoin(runtime, version=None, clean=True)
    while True:
        result, error = _enter(runtime, call, handlers)
        parked = park_all(runtime.life, has_returned=error is None)
        if error is None:
            if runtime.gate.await_release(parked.version):
                return result
        elif isinstance(error, SystemExit):
            runtime.verdict.await_interrupt(error)
        elif not isinstance(error, Interrupted):
            runtime.verdict.await_on(error, clean=parked.clean)
        _rejoin(
            runtime,
            version=parked.version,
            clean=parked.clean,
            reason=parked.reason,
            meanwhile=functools.partial(_let_go, error),
        )
        error = None


def _rejoin(runtime: Runtime, **held: Any) -> None:
    """Wait at the gate if a recovery is going on.

    Then make the default group again, if it was made outside the function.
    """
    while runtime.gate.wait(**held):
        if runtime.outer_group.remake():
            return


def _enter(
    runtime: Runtime, call: Callable[[], Any], handlers: Handlers
) -> tuple[Any, BaseException | None]:
    """One entry into the user's function: its result, or what ended it.

    KeyboardInterrupt passes through; so does SystemExit, unless the job is to be saved first.
    """
    life, orders = runtime.life, runtime.orders
    with orders.condition:
        interrupted = orders.must_gate
        orders.where = Where.WAITING if interrupted else Where.INSIDE
    if interrupted:
        return None, Interrupted("interrupted before the function was entered")
    runtime.enter()
    # The signal handler raises wherever the main thread is while `in_recoverable` is set: also in
    # the handlers of the inner try. The outer one makes sure that this cannot leave the loop, nor
    # can what a handler of the script raises before it is replaced.
    try:
        try:
            outcome = _call(runtime, call, handlers)
        finally:
            handlers.replace()
    except (Interrupted, Exception) as error:  # noqa: BLE001
        outcome = None, error
    finally:
        life.interrupts.in_recoverable = False
    handlers.replace()
    with orders.condition:
        orders.where = Where.WAITING
    forget(life)
    return outcome


def _call(
    runtime: Runtime, call: Callable[[], Any], handlers: Handlers
) -> tuple[Any, BaseException | None]:
    life = runtime.life
    try:
        life.interrupts.in_recoverable = True
        if life.interrupts.pending is not None:  # it came between INSIDE and the line above
            return None, Interrupted(life.interrupts.pending)
        handlers.put_back()
        result = call()
        if life.saving.periodic is not None:
            life.saving.periodic.wait()
    except Interrupted as interrupt:
        return None, interrupt
    except SystemExit as error:
        if not runtime.is_to_be_saved:
            raise
        return None, error
    except Exception as error:  # noqa: BLE001
        return None, error
    return result, None


def _let_go(error: BaseException | None) -> None:
    """Free what the frames of the old entry hold: loaders with their processes, DDP, the old model.

    Also what is in circles, as FSDP2's groups of parameters are, with their process groups: Python
    looks for those in old age only, after hundreds of recoveries, and then it would free groups
    wherever the main thread is. It takes less time than the replacement's start.
    """
    drop_frames(error)
    gc.collect()
