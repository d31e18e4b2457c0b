"""Whether what steps draw from torch's generator is the same again after a fault.

A DataLoader without a generator of its own draws a number from torch's when a pass begins. An entry
that goes on in the middle of a pass begins it once more, with the generator as it was at the last
commit: what steps draw from there on is something else. Owns the warning of it, which comes when
two steps have drawn within such passes: the first alone may have made parameters. Looks at the
generator once in a step, and never draws.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.life import Life, current
from taskd.worker.state import passes
from taskd.worker.state.data_order import is_kept
from taskd.worker.state.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_MARK = "_taskd_randoms"
_ENOUGH = 2  # steps that have drawn


class _Pass:
    """One through data, by a loader that draws from torch's generator."""

    def __init__(self, version: int | None, seen: bytes, before: bytes | None) -> None:
        self.version = version  # when it was looked at last
        self.seed = torch.initial_seed()  # with which the generator was seeded then
        self.seen = [seen]  # the generator then, and behind what passes have drawn since
        self.before = before  # the generator before this pass has drawn; None: it has not
        self.is_new = True  # no batch has been asked for


class StepRandoms:
    """One per life."""

    def __init__(self, life: Life) -> None:
        self.is_done = False  # it has been said, or need not be
        self._life, self._state = life, logbook_of(life).randoms.torch_state
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()
        self._last = b""  # the generator when any pass was looked at last
        self._drawn = 0  # steps that have

    def begin(self, draw: Callable[[], object]) -> _Pass:
        """A pass begins by `draw`, which may draw."""
        before = self._state()
        draw()
        after = self._state()
        self._add(before, after)
        begun = _Pass(self._life.records.version, after, None if before == after else before)
        self._passes.add(begun)
        return begun

    def first(self, begun: _Pass, draw: Callable[[], object]) -> object:
        """What `draw` returns: the first batch. Its order may have been drawn since `begin`."""
        begun.is_new = False
        if self._state() == begun.before:  # the script has set it back: nothing was drawn
            self._passes.discard(begun)
        try:
            return draw()
        finally:
            self._add(begun.seen[0], self._state())

    def _add(self, before: bytes, after: bytes) -> None:
        """What a pass has drawn to begin, that of an evaluation as well, no step has drawn."""
        for one in self._passes if before != after else ():
            if before in one.seen:
                one.seen.append(after)

    def following(self, one: _Pass, draw: Callable[[], object]) -> object:
        """What `draw` returns: a batch. Steps have been committed since this pass gave the last."""
        now, seed = self._state(), torch.initial_seed()
        batch = draw()  # if the pass ends here, it is not begun once more
        self._look(one, now, seed)
        return batch

    def _look(self, one: _Pass, now: bytes, seed: int) -> None:
        """`now`: the generator behind these steps; `seed`: with which it was seeded then.

        A script that seeds the generator in each step, or keeps it with each, draws the same again.
        """
        is_seeded = seed != one.seed or now == self._last
        if now not in one.seen and not is_seeded and one in self._passes:
            self._drawn += 1
        one.version, one.seen, one.seed = self._life.records.version, [now], seed
        self._last = now
        if self._drawn < _ENOUGH:
            return
        self.is_done = True
        if not is_kept(self._life, torch.frombuffer(bytearray(now), dtype=torch.uint8)):
            log.warning(
                "rank %d: steps draw from torch's generator within a pass of a DataLoader that has "
                "none of its own: it draws a number there when a pass begins, and once more after "
                "a fault in the middle of one, so that dropout and all else that is drawn from "
                "there on differ from a run without the fault. Where that matters, give a loader "
                "with a sampler= a generator of its own: generator=g, with g.manual_seed(epoch) "
                "before each pass",
                self._life.rank,
            )


def install() -> None:
    """Look at the passes of torch's DataLoader."""
    passes.watch(_MARK, _begin, _follow)


def _begin(iterator: Any, loader: Any, draw: Callable[[], None]) -> None:
    is_own = getattr(loader, "generator", None) not in (None, torch.default_generator)
    watch = None if is_own else _watch(current())
    if watch is None:
        draw()
    setattr(iterator, _MARK, None if watch is None else watch.begin(draw))


def _follow(iterator: Any, draw: Callable[[], object]) -> object:
    begun: _Pass | None = getattr(iterator, _MARK, None)
    if begun is None:
        return draw()
    life = current()
    watch: StepRandoms | None = None if life is None else life.records.step_randoms
    if life is None or watch is None or watch.is_done or not _is_main():
        return draw()
    if begun.is_new:
        return watch.first(begun, draw)
    return draw() if life.records.version == begun.version else watch.following(begun, draw)


def _watch(life: Life | None) -> StepRandoms | None:
    """None: nobody is to be warned, or not of this.

    A pass that begins before restore() draws before the generator is set to where it was.
    """
    if (
        life is None
        or life.world_rank
        or not life.interrupts.in_recoverable
        or not _is_main()
        or not life.records.has_restored
    ):
        return None
    watch: StepRandoms | None = life.records.step_randoms
    if watch is None:
        watch = life.records.step_randoms = StepRandoms(life)
    return None if watch.is_done else watch


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
