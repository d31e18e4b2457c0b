"""The decorated training function: its entries, what is repaired before them, what it leaves.

    first entry              the ranks compare their replicas; func()
    a fault elsewhere        taskd makes the main thread leave func(); stop, clean
    entry in a recovery      func() up to "ARF FINISH", in a replacement that has asked what it is;
                             rebuild; repair, on the ranks that send or receive; rollback; func()
    the job has to end       save, on one rank of each part; rename, on one of them

All of it runs in the main thread, but stop, where a device has to be made to raise. Which version
is gone on from, and who sends it to whom, is said by taskd's manager.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import taskd
from mindio_ttp import devices, process, replicas, reports, settings, utils
from mindio_ttp.carrier import Handover
from mindio_ttp.names import ReportState
from mindio_ttp.notices import warn_once
from mindio_ttp.replicas import ReplicaGroup
from taskd.errors import IncurableError
from taskd.worker.carried_state import (
    CarriedState,
    ask_all,
    hold_interrupts,
    on_stop,
    report_overdue,
)
from taskd.worker.life import Life, current

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_NAME = "mindio_ttp"
# Recoveries in a row in which handlers were called and have not come to their end. A fault may meet
# one by chance; two speak against the handlers.
_MAX_INCOMPLETE = 2
_CLEAN_FAILED, _CLEAN_IS_ENOUGH = 1, 2  # what the clean handler may answer, beside 0


@dataclass(frozen=True)
class _Agreed:
    """What all ranks have said before an entry: the same on all of them, but the groups.

    `groups`: of this rank. `refusal`: why nothing can be recovered. `obstacle`: why this fault
    cannot be. `new`: ranks whose process has not trained yet.
    """

    groups: tuple[ReplicaGroup, ...]
    refusal: str = ""
    obstacle: str = ""
    new: frozenset[int] = frozenset()


class Training:
    """One call of the decorated function. Its positional arguments are a list.

    Handlers may change it, and the next entry is called with what is in it then.
    """

    def __init__(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._process = process.current()
        self._incomplete = 0
        self._has_begun = False  # an entry of this process has come to its first step
        self._entry = 0
        self._stopping = threading.Lock()  # taken while the stop handler runs
        self._is_stopped = self._has_left = False
        self._state: CarriedState | None = None  # of the present entry
        self._devices: dict[str, int] = {}  # of the main thread

    @property
    def step_args(self) -> Any:
        """What handlers are told: by tft_set_step_args, else the arguments of the function."""
        given = self._process.step_args
        return self._args if given is None else given

    def enter(self) -> Any:
        """One entry of the recoverable function."""
        life = current()
        if life is None:
            return self._func(*self._args, **self._kwargs)
        self._entry += 1
        self._is_stopped, self._has_left, self._state = False, False, None
        try:
            return self._run(life)
        except taskd.Interrupted as interrupt:
            if not self._has_left:  # it came before interrupts were held off
                self._leave(life, interrupt)
            raise
        finally:
            self._process.state, self._process.is_updating = None, False

    def _run(self, life: Life) -> Any:
        try:
            self._begin(life)
            return self._func(*self._args, **self._kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            self._note_damage(error)  # the job may be saved yet
            self._spoil()
            raise
        except BaseException as error:
            self._leave(life, error)
            raise

    # ------------------------------------------------------------------ before the function

    def _begin(self, life: Life) -> None:
        """Agree with the other ranks, repair what a fault has left, and count steps from here."""
        me = self._process
        self._devices = devices.current()
        me.handlers.on_overdue = functools.partial(report_overdue, life)
        on_stop(life, functools.partial(self._stop_in_thread, self._entry))
        sources = {rank: move.source for rank, move in life.plan.moves.items()
                   if move.source is not None}  # fmt: skip
        is_recovery = life.plan.version is not None
        if is_recovery:
            self._prepare()
        agreed = self._agree(life, has_moves=bool(sources))
        refusal, groups = agreed.refusal, agreed.groups
        shard = "" if refusal else replicas.shard_of(groups, life.world_rank, life.world_size)
        handover = Handover(me, life.rank, groups, lambda: self.step_args)
        state = self._state = CarriedState(_NAME, handover, shard_id=shard)
        if is_recovery and (refusal or agreed.obstacle):
            # what is parked is whole, and can be saved, if the script knows how
            message = f"nothing can be repaired in place: {refusal or agreed.obstacle}"
            if not me.handlers.has("save"):
                state.refuse(message)
            log.error("rank %d: %s", life.rank, message)
            raise IncurableError(message)
        if refusal:
            warn_once("mindio_ttp", f"{refusal}: a fault of one process restarts all of them")
            state.refuse(refusal)
        elif is_recovery:
            # a rank that receives may also be one whose memory was damaged
            me.repair_type = "recover" if agreed.new & sources.keys() else "retry"
            me.repair_step = life.plan.version or 0
            self._repair(state, sources)
        else:
            state.restore()
        if me.refusal:
            state.refuse(me.refusal)
        me.state, self._has_begun = state, True

    def _prepare(self) -> None:
        """Let the script of a replacement come as far as it can, as it was told that it is one."""
        me = self._process
        if not me.is_replacement or not me.has_asked:
            return
        me.is_preparing = True
        try:
            self._func(*self._args, **self._kwargs)
        except process.Prepared:
            pass
        except RuntimeError as error:
            if reports.ARF_FINISH not in str(error):
                raise
        finally:
            me.is_preparing = me.has_asked = False

    def _agree(self, life: Life, *, has_moves: bool) -> _Agreed:
        """Hear from all ranks what each knows."""
        me = self._process
        obstacle = ""
        if self._incomplete >= _MAX_INCOMPLETE:
            obstacle = f"rank {life.rank}: {_MAX_INCOMPLETE} recoveries have not come to their end"
        elif life.active:
            obstacle = "the world has become smaller, which no handler is called for"
        elif has_moves and not me.handlers.has("repair"):
            obstacle = f"rank {life.rank} has no repair handler (tft_register_repair_handler)"
        groups = tuple(me.replicas or ())
        problem = self._problem(life)
        if not dist.is_initialized() and life.world_size > 1:
            return _Agreed(groups, problem, obstacle)
        said = {"rank": life.world_rank, "problem": problem, "obstacle": obstacle,
                "is_new": not self._has_begun,
                "groups": [asdict(group) for group in groups]}  # fmt: skip
        is_recovery = life.plan.version is not None
        # a replacement builds its model before it comes here
        limit_s = None if is_recovery else settings.action_limit_s()
        try:
            texts = ask_all(life, _NAME, json.dumps(said), within_s=limit_s)
        except TimeoutError as error:
            return _Agreed(groups, f"not every rank has entered the decorated function: {error}")
        answers = [json.loads(text) for text in texts]
        problem = next((one["problem"] for one in answers if one["problem"]), "")
        obstacle = next((one["obstacle"] for one in answers if one["obstacle"]), "")
        declared = {
            one["rank"]: tuple(
                ReplicaGroup(tuple(group["ranks"]), group["copies"]) for group in one["groups"]
            )
            for one in answers
        }
        refusal = problem or replicas.misfit(declared, life.world_size)
        new = frozenset(life.rank_of(one["rank"]) for one in answers if one["is_new"])
        return _Agreed(groups, refusal, obstacle, new)

    def _problem(self, life: Life) -> str:
        """Why nothing can be recovered, as far as this rank knows."""
        processor = self._process.processor
        who = f"rank {life.rank}"
        if not dist.is_initialized() and life.world_size > 1:
            return f"{who} has entered the decorated function before init_process_group()"
        if processor is None or not processor.is_started:
            return f"{who} has no processor (tft_init_processor, tft_start_processor)"
        if (processor.rank, processor.world_size) != (life.rank, life.job_size):
            return (
                f"tft_init_processor was told rank {processor.rank} of {processor.world_size}, and "
                f"this is rank {life.rank} of {life.job_size}"
            )
        return ""

    def _repair(self, state: CarriedState, sources: dict[int, int]) -> None:
        """Process groups, what is missing, and the place in the data."""
        me, handlers = self._process, self._process.handlers
        self._incomplete += 1
        if not handlers.has("rollback"):
            warn_once(
                "tft_register_rollback_handler",
                "there is none: nobody puts back where the script is in its data",
            )
        handlers.call_limited("rebuild", sorted(sources), self.step_args, self._context("rebuild"))
        state.restore()
        me.repair_step, me.damage = state.step, ""
        with state.outside_steps():
            handlers.call_limited("rollback", state.step, self.step_args, self._context("rollback"))
        me.is_replacement, self._incomplete = False, 0

    def _context(self, name: str) -> Any:
        handlers = self._process.handlers
        return handlers.context(name) if handlers.has(name) else None

    # ------------------------------------------------------------------ behind it

    def _leave(self, life: Life, error: BaseException) -> None:
        """The entry was left before its end: stop, clean, and what that says of the memory."""
        hold_interrupts(life)
        me = self._process
        me.handlers.disarm()
        me.forget_repair()
        before = me.damage
        self._note_damage(error)
        self._stop("in the main thread", self._entry)
        answer = self._clean(is_damaged=bool(me.damage))
        if answer == _CLEAN_FAILED:
            log.error(
                "the clean handler could not clean up: this process ends, to be replaced; it was "
                "left by what follows",
                exc_info=error,  # told to nobody else
            )
            raise SystemExit(1)
        if answer == _CLEAN_IS_ENOUGH:
            # of this error; steps that were done after an earlier report are not made whole by it
            me.damage = before
        self._spoil()
        self._has_left = True

    def _note_damage(self, error: BaseException) -> None:
        """Report the error, and what it or one that it has replaced says of the memory."""
        me = self._process
        told = [one for one in reports.chain_of(error) if isinstance(one, RuntimeError)
                and reports.tells_of_damage(str(one), me.rules)]  # fmt: skip
        if told:
            me.damage = f"the memory of this rank is damaged: {told[0]}"
        self._report(told[0] if told else error)

    def _spoil(self) -> None:
        if self._process.damage and self._state is not None:
            self._state.spoil(self._process.damage)

    def _report(self, error: BaseException) -> None:
        """Into the log: by which code this error is known."""
        if not isinstance(error, RuntimeError):
            return
        me = self._process
        try:
            report = reports.classify(
                str(error),
                is_uce_enabled=me.processor is not None and me.processor.is_uce_enabled,
                can_repair=lambda us: us is not None and utils.tft_can_do_uce_repair(us),
                rules=me.rules,
            )
        except Exception:  # of the script; what follows must be done all the same
            log.exception("a rule of the script (tft_register_exception_handler) has failed")
            report = reports.Report(ReportState.RS_UNKNOWN)
        if report.state is ReportState.RS_PREREPAIR_FINISH:
            log.warning(
                "the function has raised 'ARF FINISH' in a process that is repaired: the rebuild "
                "handler is to take back what tft_is_reboot_node() has said"
            )
        log.info("%s: %s, code %r", error, report.state.name, report.code)

    def _stop_in_thread(self, entry: int) -> None:
        try:
            devices.use(self._process.devices or self._devices)
        except Exception:  # of a device that has failed, perhaps
            log.exception("the device of this process is not that of the stop handler's thread")
        self._stop("in a thread", entry)

    def _stop(self, where: str, entry: int) -> None:
        """Once for each entry, in whichever thread; the other one waits until it has returned.

        What is still being stopped cannot be cleaned. A handler that never returns keeps the main
        thread from the gate, so that the process is replaced.
        """
        with self._stopping:
            if self._is_stopped or entry != self._entry:
                return
            self._is_stopped = True
            try:
                self._process.handlers.call("stop", self.step_args, self._context("stop"))
            # whatever a device says: taskd makes the main thread leave in another way, too
            except Exception:
                log.exception("the stop handler has failed (%s)", where)

    def _clean(self, *, is_damaged: bool) -> object:
        """What the clean handler answers; 0 if there is none."""
        handlers = self._process.handlers
        if not handlers.has("clean"):
            return 0
        try:
            return handlers.call("clean", is_damaged, self.step_args, self._context("clean"))
        except Exception:  # of the script; its process is not to be gone on with
            log.exception("the clean handler has failed")
            return _CLEAN_FAILED


def protect(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` as a recoverable function whose state is in the hands of the handlers."""

    @taskd.recoverable
    @functools.wraps(func)
    def enter(training: Training) -> Any:
        return training.enter()

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return enter(Training(func, list(args), kwargs))

    return wrapper
