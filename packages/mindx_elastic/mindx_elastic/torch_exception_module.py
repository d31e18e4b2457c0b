"""`exception_checkpoint`: saves a training with torch that is ended, by the script's own function.

    set_config ── in each step, or once ──▶ what is to be saved, and by which function
    SIGTERM, an exception ──▶ the end of the step ──▶ who of each group saves ──▶ records
    next start ──▶ check_resumable_model, _get_fault_npus ──▶ which file to load

Where `set_config` is called in each step (or `_args` is assigned), that call is the end of a step:
parameters, schedulers, iteration fit together. Where it is called once, the end of
`optimizer.step()` is.

This module can be imported without torch.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from mindx_elastic import faults, gasp, groups_of_ranks, place, records, strategy
from mindx_elastic.errors import DamagedFileError
from mindx_elastic.optimizer_steps import OptimizerSteps
from mindx_elastic.termination import Termination, patience_s

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mindx_elastic.record import Record

_log = logging.getLogger(__name__)


class ExceptionHandler:
    """One per process: `exception_checkpoint`."""

    def __init__(self) -> None:
        self._save_func: Callable[..., Any] | None = None
        self._partial_save = False
        self._replicas = 1
        self._arguments: tuple[Any, ...] = ()
        self._groups: list[list[int]] | None = None
        self._known: dict[int, Record] | None = None  # of the last dying gasp
        self._checked: tuple[Any, int] | None = None  # what `_groups` were made from
        self._is_asked = False
        self._usable_by_faults: dict[tuple[int, ...], dict[int, int]] = {}
        self._faults_at_start = _mounted()
        self._lock = threading.Lock()
        self._gasp: gasp.Gasp | None = None
        self._termination: Termination | None = None
        self._steps: OptimizerSteps | None = None
        self._calls = 0  # of set_config, and assignments of _args
        self._calls_after_a_step = 0
        self._ended_at_call = 0  # steps that had ended by then
        self._called_at_s = 0.0
        self._longest_s = 0.0

    def set_config(
        self,
        save_func: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        partial_save: bool = False,
        group_info: Sequence[Sequence[int]] | None = None,
        replicas: int = 1,
    ) -> None:
        """What is saved when the training is ended: `save_func(*args)` is called.

        Args:
            save_func: must not wait for other ranks, some of which may be dead or may not save.
            args: of save_func; if the first is an integer, it is the number of the step, or where
                this is called once, that of the step from which the training goes on.
            partial_save: in each group only `replicas` live ranks save.
            group_info: groups of ranks that hold the same state; each rank is in one. Without it
                all ranks do.
            replicas: 1 or more.

        Raises:
            ValueError: for a wrong value; the configuration is then the one before.
            MissingFrameworkError: there is no torch.
        """
        if save_func is not None and not callable(save_func):
            raise ValueError(f"save_func is {save_func!r}, which cannot be called")
        if type(replicas) is not int or replicas < 1:
            raise ValueError(f"replicas is {replicas!r}, expected an integer, 1 or more")
        world_size = _world_size()
        found = self._groups
        if found is None or (group_info, world_size) != self._checked:  # not in each step
            found = groups_of_ranks.checked(group_info, world_size)
        if partial_save and self._termination is None:  # said once
            _warn_of_many(replicas, min(len(group) for group in found))
        self._checked = (group_info, world_size)
        self._groups, self._partial_save, self._replicas = found, bool(partial_save), replicas
        self._save_func = save_func
        if save_func is not None:
            self._arm(world_size)
        self._args = tuple(args)

    @property
    def _args(self) -> tuple[Any, ...]:
        return self._arguments

    @_args.setter
    def _args(self, value: tuple[Any, ...]) -> None:
        """The end of a step, for a script that says so in each one."""
        self._arguments = value
        now = time.monotonic()
        if self._calls > 1:
            self._longest_s = max(self._longest_s, now - self._called_at_s)
        self._called_at_s = now
        self._calls += 1
        if self._steps is not None:
            self._ended_at_call = self._steps.ended
            self._calls_after_a_step += self._steps.ended > 0
        if self._termination is not None and self._termination.has_come and self._has_trained():
            self._save_and_end()

    @property
    def _group_info(self) -> list[list[int]] | None:
        """As configured, else as the last dying gasp says, else None.

        Documented scripts take it for a list as soon as they have asked for faulty chips: from then
        on, where nothing is known, each rank stands for itself, and no other can be taken for it.
        """
        if self._groups is None:
            for one in self._records().values():
                return [list(group) for group in one.groups]
            if self._is_asked:
                return [[rank] for rank in range(_world_size())]
        return self._groups

    @_group_info.setter
    def _group_info(self, value: Sequence[Sequence[int]] | None) -> None:
        self._groups = None if value is None else groups_of_ranks.checked(value, _world_size())
        self._checked = None

    def check_resumable_model(self) -> bool:
        """Whether the last dying gasp can be gone on from, as a whole.

        If not, the log says why, and the iteration is to be set back to the last periodic
        checkpoint.
        """
        self._is_asked = True
        try:
            step, sources = self._sources()
        except strategy.NoWayError as error:
            _log.warning("rank %d: no dying gasp is loaded: %s", place.rank(), error)
            return False
        _log.warning(
            "rank %d: goes on from step %d of ranks %s",
            place.rank(),
            step,
            strategy.restore_ranks(sources),
        )
        return True

    def _get_fault_npus(self) -> list[str]:
        """Ranks whose own file cannot be loaded: their chip is faulty, or they have not saved.

        Once training goes on, nothing is loaded any more, and only chips count that have become
        faulty since the start.
        """
        self._is_asked = True
        mounted = _mounted()
        if self._steps is not None and self._steps.ended > 0:
            return _texts(mounted or ()) if mounted != self._faults_at_start else []
        found = set(self._faults_of_the_records() if mounted is None else mounted)
        try:
            step, _ = self._sources()
        except strategy.NoWayError:
            return _texts(found)
        steps = self._usable(found)
        return _texts(found | {rank for rank in range(_world_size()) if steps.get(rank) != step})

    def _faults_of_the_records(self) -> set[int]:
        return {rank for one in self._records().values() for rank in one.fault_ranks}

    def _sources(self) -> tuple[int, dict[tuple[int, ...], int]]:
        """Raises NoWayError."""
        found = self._records()
        groups = self._group_info
        if not found or groups is None:
            raise strategy.NoWayError(f"no rank has left a record in {place.folder()}")
        for rank, one in found.items():
            if groups_of_ranks.as_set(one.groups) != groups_of_ranks.as_set(groups):
                raise strategy.NoWayError(
                    f"rank {rank} has saved with other groups of ranks than those of this start"
                )
        strategy.check_groups(groups, _world_size())
        mounted = _mounted()
        faulty = self._faults_of_the_records() if mounted is None else mounted
        return strategy.plan(groups, self._usable(faulty))

    def _usable(self, faulty: Collection[int]) -> dict[int, int]:
        key = tuple(sorted(faulty))
        if key not in self._usable_by_faults:
            self._usable_by_faults[key] = records.usable(self._records().values(), key)
        return self._usable_by_faults[key]

    def _records(self) -> dict[int, Record]:
        if self._known is None:
            self._known = records.latest(_world_size(), "torch")
        return self._known

    def _has_trained(self) -> bool:
        """Whether a step has been completed by this process."""
        return self._steps is not None and (self._steps.ended > 0 or self._is_told_each_step())

    def _is_told_each_step(self) -> bool:
        """Whether the script says when a step is over.

        Of an optimizer that is not torch's no step is seen: then two calls may be preparation, a
        third one is not.
        """
        return self._calls_after_a_step > 0 or (self._ended() == 0 and self._calls > 2)

    def _ended(self) -> int:
        return 0 if self._steps is None else self._steps.ended

    def _arm(self, world_size: int) -> None:
        if self._termination is not None:
            return
        self._steps = OptimizerSteps(self._before_step, self._after_step)
        self._gasp = gasp.Gasp(place.rank(), world_size)
        self._termination = Termination(self._save_late, lambda: patience_s(self._longest_s))
        if not self._termination.arm():
            _log.warning(
                "rank %d: set_config was not called in the main thread, which alone can handle "
                "SIGTERM: it will end the training without a checkpoint",
                place.rank(),
            )
        former = sys.excepthook

        def at_exception(kind: Any, error: Any, trace: Any) -> None:
            former(kind, error, trace)
            if isinstance(error, Exception):
                self._save(f"{kind.__name__}: {str(error).strip()[:200]}")
            # Whoever is told to end fails in a collective if others have ended sooner: what has
            # started the ranks is to see that they ended as it wanted.
            if self._termination is not None and self._termination.has_come:
                self._termination.end()

        sys.excepthook = at_exception

    def _before_step(self) -> None:
        """While the other thread saves, no optimizer changes what it saves."""
        with self._lock:
            pass

    def _after_step(self) -> None:
        """An optimizer has changed the parameters. The end of a step, if nothing else is one."""
        is_once = not self._is_told_each_step() and self._ended() > 1
        if is_once and self._termination is not None and self._termination.has_come:
            self._save_and_end()

    def _save_late(self) -> None:
        """In the thread of `Termination`: the main thread is stuck, or in a long step."""
        try:
            self._save_and_end()
        except Exception:  # noqa: BLE001 - the top of a thread: nobody above could be told
            _log.exception("rank %d: the checkpoint could not be saved", place.rank())

    def _save_and_end(self) -> None:
        assert self._termination is not None
        self._save("SIGTERM")
        self._termination.end()

    def _reason_against(self) -> str | None:
        """Why what is there is not a whole step."""
        assert self._steps is not None
        if not self._has_trained():
            return "no step has been completed since the training began"
        if self._steps.is_in_step:
            return "an optimizer is changing the parameters"
        if self._is_told_each_step() and self._steps.ended != self._ended_at_call:
            return "an optimizer has changed the parameters since the last call of set_config"
        return None

    def _step(self) -> int:
        """Of what is saved, for the record, by which the next start compares the ranks.

        Where the script does not say when a step is over, its number is that of the beginning.
        """
        first = self._arguments[0] if self._arguments else None
        if type(first) is not int or first < 0:
            return self._ended()
        return first if self._is_told_each_step() else first + self._ended()

    def _save(self, cause: str) -> None:
        """Once; what prevents it is logged."""
        with self._lock:
            if self._save_func is None or self._gasp is None or self._gasp.is_over:
                return
            reason = self._reason_against()
            if reason is not None:
                _log.error(
                    "rank %d: no checkpoint is written (%s): %s. The next start goes on from an "
                    "older one.",
                    place.rank(),
                    cause,
                    reason,
                )
                return
            mounted = _mounted()
            order = gasp.Order(
                save=self._save_func,
                arguments=self._arguments,
                step=self._step(),
                groups=self._groups or groups_of_ranks.checked(None, _world_size()),
                replicas=_at_least_one(self._replicas) if self._partial_save else None,
                fault_ranks=() if mounted == self._faults_at_start else mounted or (),
                cause=cause,
            )
            self._gasp.save(order)


def _texts(ranks: Any) -> list[str]:
    return [str(rank) for rank in sorted(ranks)]


def _mounted() -> tuple[int, ...] | None:
    """The list of faults; None: there is none that can be read."""
    try:
        return faults.read()
    except DamagedFileError as error:
        _log.warning("the list of faults is not used: %s", error)
        return None


def _warn_of_many(replicas: int, smallest: int) -> None:
    if replicas > smallest:
        _log.warning(
            "replicas is %d, and the smallest group has %d ranks: all of it save",
            replicas,
            smallest,
        )


def _at_least_one(replicas: object) -> int:
    """A script may have assigned anything to `_replicas`; this is no time to fail for that."""
    if type(replicas) is int and replicas >= 1:
        return replicas
    _log.warning("_replicas is %r, expected an integer, 1 or more: taken as 1", replicas)
    return 1


def _world_size() -> int:
    found = place.world_size()
    if found is None:
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            found = distributed.get_world_size()
    return found or 1


exception_checkpoint = ExceptionHandler()
