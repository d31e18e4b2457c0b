"""The part of benchmarks/marks.py that runs in the workers.

Blocks with and without marks and pulse, in turn.
"""

from __future__ import annotations

import pathlib
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

import taskd
from taskd.worker import life as life_module
from taskd.worker.process import runtime
from taskd.worker.process.pulse import BEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable


class Marks:
    """Takes marks and pulse out, and puts them back. There is no public way to do that."""

    def __init__(self, module: Any) -> None:
        self.spent_ns = 0
        self._life: Any = life_module.current()
        self._pulse: Any = runtime.current()._pulse  # type: ignore[union-attr]  # noqa: SLF001
        self._module = module
        self._hooks = dict(module._forward_pre_hooks)  # noqa: SLF001
        self._mark, self._mark_step = self._life.mark, self._life.box.mark_step
        self._beat = self._pulse.beat

    def switch(self, *, is_on: bool, is_counting: bool) -> None:
        """`is_counting`: note what they take, which costs something itself."""
        self.spent_ns = 0
        wrap = self._timed if is_counting else lambda call: call
        self._life.mark = wrap(self._mark) if is_on else _nothing
        self._life.box.mark_step = wrap(self._mark_step) if is_on else _nothing
        self._module._forward_pre_hooks.clear()  # noqa: SLF001
        self._module._forward_pre_hooks.update(self._hooks if is_on else {})  # noqa: SLF001
        self._pulse.beat = self._beat if is_on else self._wake_up_only

    def _wake_up_only(self) -> None:
        self._pulse._next_at = time.monotonic() + BEAT_S  # noqa: SLF001

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter_ns()
            call(*args, **kwargs)
            self.spent_ns += time.perf_counter_ns() - began

        return run


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _threads() -> dict[str, pathlib.Path]:
    """Those of taskd: the runtime's, and the guard of libtaskd."""
    found = {
        f"runtime {thread.name}": pathlib.Path(f"/proc/self/task/{thread.native_id}")
        for thread in threading.enumerate()
        if thread.name == "taskd"
    }
    guards = [
        task
        for task in pathlib.Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "taskd-guard\n"
    ]
    assert found
    assert guards
    return found | {"guard": guards[0]}


def run(
    prepare: Callable[[], Any], one_step: Callable[..., None], out: TextIO, steps: int, block: int
) -> None:
    """`block` steps each.

    The last quarter counts what the marks take; those blocks are not compared.
    """

    @taskd.recoverable
    def train() -> None:
        _, optimizer, position, ddp, state = prepare()
        marks, tasks = Marks(ddp.module), _threads()
        began_ns = time.monotonic_ns()
        before = {
            name: int((task / "schedstat").read_text().split()[0]) for name, task in tasks.items()
        }
        for step in range(steps):
            is_counting = step >= steps * 3 // 4
            if step % block == 0:
                marks.switch(is_on=step // block % 2 == 0, is_counting=is_counting)
            one_step(ddp, optimizer, step, position)
            state.commit()
            out.write(
                f"{'count' if is_counting else 'block'} {step // block} "
                f"{time.monotonic_ns()} {marks.spent_ns}\n"
            )
        wall_ns = time.monotonic_ns() - began_ns
        for name, task in tasks.items():
            used_ns = int((task / "schedstat").read_text().split()[0]) - before[name]
            out.write(f"thread {name.split()[0]} {used_ns} {wall_ns}\n")

    train()
