"""Passes through data that are under way at a commit: a resumed entry goes on with them.

When a pass through a DataLoader begins, torch draws one number from its global generator: the seed
of the pass, which with the number of a process of the loader seeds that process. An entry that goes
on in the middle of a pass begins it once more, and would draw once more: dropout would differ from
then on, and so would what the processes draw. So each commit notes the passes that are under way,
with their seeds. In an entry that was restored to that commit, who begins one of them gets its
seed, and torch's generator stays as it is. The generators are those of the commit again, whatever
was drawn before that and while the batches done are skipped. Nothing is changed in an entry that
begins afresh.

Owns which loader and which pass is the same as before; docs/assumptions.md says it for users. Left
alone are loaders with a generator of their own, those whose order comes from the global one
(`taskd.worker.state.data_order` warns of them), and DataPipes, whose order comes from it as well.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, dataloader

from taskd.worker import internals
from taskd.worker.life import current
from taskd.worker.state import data_order

if TYPE_CHECKING:
    from taskd.worker.life import Life

_MARK = "_taskd_pass"
_ROLE = "role "  # the name of a loader that a TrainState carries begins so
_SEEDS = "the seeds of passes through data"


class Noted(NamedTuple):
    """What a commit says of one pass; kept as a plain tuple."""

    loader: str  # what it is a pass of, and which of several alike
    ordinal: int
    seed: int
    epoch: int | None  # that of the sampler when it began; None: it has none
    handed_out: int  # batches so far
    length: int | None  # in batches; None: not known
    is_persistent: bool  # its iterator is used again for the next pass, and draws no other seed
    is_over: bool

    @property
    def outlasts_steps(self) -> bool:
        """Whether it may be gone on with later than in the first step of an entry."""
        return self.is_persistent or self.loader.startswith(_ROLE)


_outside: list[weakref.ref[Any]] = []  # loaders that were made outside the function


@dataclass(eq=False)
class Pass:
    """One that was begun in this entry."""

    loader: str
    ordinal: int
    epoch: int | None
    length: int | None
    iterator: weakref.ref[Any]
    is_carried: bool  # a StatefulDataLoader that a TrainState has: it goes on where it was
    is_persistent: bool
    is_over: bool = False
    # of a pass that goes on: batches that were handed out before, 0: there is nothing to skip (any
    # more); whether they are skipped, as far as is known; the generators at its beginning
    skipped: int = 0
    is_skipped: bool = False
    random: dict[str, Any] = field(default_factory=dict)

    def noted(self) -> tuple[Any, ...] | None:
        """As a `Noted`. None: it is not under way any more."""
        iterator = self.iterator()
        if iterator is None or (self.is_over and not self.is_persistent and not self.is_carried):
            return None
        return (
            self.loader, self.ordinal, iterator._base_seed, self.epoch, iterator._num_yielded,
            self.length, self.is_persistent, self.is_over,
        )  # fmt: skip


class Passes:
    """Those of one entry of the function, and those that it may go on with."""

    def __init__(self) -> None:
        self._begun: list[Pass] = []
        self._made: list[weakref.ref[Any]] = []  # loaders of this entry
        self._version: int | None = None  # that was restored
        self._random: dict[str, Any] | None = None  # its generators, until they are back for good
        self._found: tuple[tuple[Any, ...], ...] = ()  # what was noted with it
        self._left: list[Noted] = []  # of these, which nobody has gone on with
        self._last = b""  # the generators when one that may be skipped was fetched

    def expect(self, version: int, found: Iterable[Iterable[Any]], random: dict[str, Any]) -> None:
        """The entry was restored to `version`, with which these were noted; its generators."""
        self._random = random
        self._version, self._found = version, tuple(tuple(one) for one in found)
        self._left = [Noted(*one[: len(Noted._fields)]) for one in self._found]
        for one in self._begun:  # before restore(), which has put the generators back
            self._take(self._match(one.loader, one.ordinal, one.ordinal + 1))

    def at(self, version: int) -> tuple[tuple[Any, ...], ...]:
        """What is to be noted with `version`, or has been, if it was restored."""
        if version == self._version:
            return self._found
        noted = [one.noted() for one in self._begun]
        if None in noted:
            self._begun = [one for one, said in zip(self._begun, noted, strict=True) if said]
        return (
            *(said for said in noted if said is not None),
            *(tuple(one) for one in self._left if one.outlasts_steps),
        )

    def make(self, loader: Any) -> None:
        """A loader was made, or is gone through that was not seen then."""
        self._made = [other for other in self._made if other() is not None]
        self._made.append(weakref.ref(loader))

    # ------------------------------------------------------------------ a pass begins

    def begin(self, life: Life, iterator: Any, loader: Any) -> tuple[Pass, Noted | None]:
        """The pass, and which one it goes on with."""
        name = _name(life, loader)
        alike = self._alike(life, loader, name)
        begun = Pass(
            name,
            alike.index(id(loader)),
            _epoch(loader),
            _length(loader),
            weakref.ref(iterator),
            is_carried=name.startswith(_ROLE) and hasattr(loader, "next_iter_state"),
            is_persistent=bool(loader.persistent_workers and loader.num_workers),
        )
        before = self._match(name, begun.ordinal, len(alike))
        if before is None:
            return begun, None
        is_same = self._is_same(life, loader, before, begun.epoch)
        if not is_same and not before.is_persistent:
            return begun, None
        self._take(before)
        generator = torch.default_generator
        if data_order.is_just_seeded(life, generator, generator.get_state()):
            return begun, None  # by the script, for this pass: it draws the same seed again
        if is_same:
            self._put_back(life)
        if is_same and not hasattr(loader, "next_iter_state"):
            begun.skipped = before.handed_out
            begun.random = life.records.logbook.randoms.read()
        return begun, before

    def follow(self, begun: Pass) -> None:
        """It has begun."""
        self._begun = [one for one in self._begun if one.iterator() is not begun.iterator()]
        self._begun.append(begun)

    def _alike(self, life: Life, loader: Any, name: str) -> list[int]:
        """The identities of loaders that only their order tells from this one, which is among them.

        That in which they were made, those outside the function first.
        """
        made = [other() for other in (*_outside, *self._made)]
        if not any(other is loader for other in made):
            self.make(loader)
            made.append(loader)
        return [id(other) for other in made if other is not None and _name(life, other) == name]

    def _match(self, name: str, ordinal: int, count: int) -> Noted | None:
        """That of the same ordinal, or the only one, if none of so many loaders has its ordinal."""
        alike = [one for one in self._left if one.loader == name]
        same = [one for one in alike if one.ordinal == ordinal]
        if same:
            return same[0]
        return alike[0] if len(alike) == 1 and alike[0].ordinal >= count else None

    def _take(self, one: Noted | None) -> None:
        if one is not None:
            self._left.remove(one)

    def _is_same(self, life: Life, loader: Any, before: Noted, epoch: int | None) -> bool:
        """Whether the pass that begins is that one."""
        if getattr(loader, "next_iter_state", None) is not None:
            return True  # of torchdata: where it was has been restored
        if life.records.version != self._version:  # that pass would have been needed for the step
            return False
        if before.is_over:
            return False
        if epoch is not None and before.epoch is not None:
            return epoch == before.epoch
        if before.length is None or before.handed_out < before.length:
            return True
        # All of it was handed out. Either the script skips all of it and comes to its end, or it
        # begins the next one: it can skip only what it has a number of.
        done = {before.handed_out, before.handed_out - 1}
        return any(
            _has_number(holding.roles.values, done) for holding in life.records.states.values()
        )

    # ------------------------------------------------------------------ a pass goes on

    def _is_first_step(self, life: Life) -> bool:
        """Whether nothing of the step behind the version that was restored is done."""
        is_ahead = any(holding.is_ahead for holding in life.records.states.values())
        return life.records.version == self._version and not is_ahead

    def _put_back(self, life: Life) -> None:
        """At the first pass that goes on: in the run without a fault nothing was drawn by now."""
        random, self._random = self._random, None
        if random is not None and self._is_first_step(life):
            life.records.logbook.randoms.restore(random)

    def before_batch(self, life: Life, one: Pass, number: int) -> None:
        """A pass that goes on is to hand out this batch.

        Two without a step in between: the script skips those that are done. What was drawn for them
        is undone. If there is a step in between, the sampler begins behind them, and nothing is
        skipped. Of a single one it is known when the next one is asked for.
        """
        if number == 0:
            return
        if not self._is_first_step(life):
            one.skipped = 0
        elif number < one.skipped:
            one.is_skipped = True
        else:
            self._end_skipping(life, one)

    def after_batch(self, life: Life, one: Pass, number: int) -> None:
        """It has been handed out, as the last of so many."""
        self._last = life.records.logbook.randoms.capture()
        if one.is_skipped and number >= one.skipped:
            self._end_skipping(life, one)

    def _end_skipping(self, life: Life, one: Pass) -> None:
        one.skipped = 0
        randoms = life.records.logbook.randoms
        if randoms.capture() == self._last:  # else something of the step was drawn
            randoms.restore(one.random)
            self._last = randoms.capture()


def passes_of(life: Life) -> Passes:
    """Those of the present entry, made when first asked for. Parking forgets them."""
    passes: Passes | None = life.records.passes
    if passes is None:
        passes = life.records.passes = Passes()
    return passes


# ---------------------------------------------------------------- what tells a loader


def _name(life: Life, loader: Any) -> str:
    """The same for a loader of another entry, or process, that stands for this one."""
    role = data_order.role_of(life, loader)
    if role:
        return _ROLE + role
    data, sampler = loader.dataset, data_order.sampler_of(loader)
    size = None if isinstance(data, IterableDataset) else _size(data)
    kinds = (type(data).__qualname__, type(loader.batch_sampler).__qualname__)
    kind = f"{type(sampler).__qualname__} {getattr(sampler, 'shuffle', None)}"
    return f"{kinds[0]} {size} {loader.batch_size} {kinds[1]} {kind} {loader.num_workers}"


def _size(owner: Any) -> int | None:
    try:
        return len(owner)
    except Exception:  # noqa: BLE001 - code of the user's classes
        return None


def _length(loader: Any) -> int | None:
    """In batches. Only of a batch sampler of torch: another one may draw to find out."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    is_known = batches is None or getattr(type(batches), "__len__", 0) is BatchSampler.__len__
    return _size(loader.sampler if batches is None else batches) if is_known else None


def _epoch(loader: Any) -> int | None:
    for owner in (loader.batch_sampler, data_order.sampler_of(loader)):
        epoch = getattr(owner, "epoch", None)
        if type(epoch) is int:
            return epoch
    return None


def _has_number(value: Any, numbers: set[int]) -> bool:
    if isinstance(value, Mapping):
        return any(_has_number(item, numbers) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_number(item, numbers) for item in value)
    return type(value) is int and value in numbers


# ---------------------------------------------------------------- in torch


def install() -> None:
    """Wrap the iterators of torch's DataLoader, those of torchdata among them."""
    kind: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if not internals.has(_SEEDS, (kind, "__next__"), (kind, "_reset")):
        return
    if getattr(kind.__init__, _MARK, False):
        return
    _see_loaders()
    original_init, original_reset, original_next = kind.__init__, kind._reset, kind.__next__

    @functools.wraps(original_init)
    def begin(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        with _beginning(self, loader):
            original_init(self, loader, *args, **kwargs)

    @functools.wraps(original_reset)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            original_reset(self, loader, first_iter)
            return
        with _beginning(self, loader):
            original_reset(self, loader, first_iter)

    @functools.wraps(original_next)
    def following(self: Any) -> Any:
        present: Pass | None = getattr(self, _MARK, None)
        return original_next(self) if present is None else _next(self, present, original_next)

    setattr(begin, _MARK, True)
    kind.__init__, kind._reset, kind.__next__ = begin, reset, following


def _see_loaders() -> None:
    """Note which loaders are made. Those of torchdata are seen when they are gone through."""
    original = DataLoader.__init__

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        life = current()
        if life is None or not life.interrupts.in_recoverable:
            _outside[:] = [other for other in _outside if other() is not None]
            _outside.append(weakref.ref(self))
        elif threading.current_thread() is threading.main_thread():
            passes_of(life).make(self)

    DataLoader.__init__ = make  # type: ignore[method-assign]


def _next(iterator: Any, present: Pass, original: Callable[[Any], Any]) -> Any:
    life = current() if present.skipped else None
    if life is not None:
        passes_of(life).before_batch(life, present, iterator._num_yielded)
    try:
        batch = original(iterator)
    except StopIteration:
        present.is_over = True
        raise
    if life is not None and present.skipped:
        passes_of(life).after_batch(life, present, iterator._num_yielded)
    return batch


@contextmanager
def _beginning(iterator: Any, loader: Any) -> Iterator[None]:
    """A pass begins within; it goes on with one of the last entry, if it is that."""
    life = current()
    if life is None or not _is_concerned(life, loader):
        yield
        return
    passes = passes_of(life)
    begun, before = passes.begin(life, iterator, loader)
    state = None if before is None else torch.default_generator.get_state()
    yield
    if not hasattr(iterator, "_base_seed") or not hasattr(iterator, "_num_yielded"):
        internals.lose(_SEEDS, "_base_seed is not there")
        return
    if before is not None and state is not None:
        torch.default_generator.set_state(state)
        iterator._base_seed = before.seed
    setattr(iterator, _MARK, begun)
    passes.follow(begun)


def _is_concerned(life: Life, loader: Any) -> bool:
    return (
        life.interrupts.in_recoverable
        and loader.generator is None
        and data_order.generator_of(loader) is not torch.default_generator
        and not isinstance(loader.dataset, IterDataPipe)
        and threading.current_thread() is threading.main_thread()
    )
