"""The default process group of a script that makes it outside its recoverable function.

Owns when such an `init_process_group` runs, and how it is done again: in a replacement it waits for
the others, wherever it is called, and the others make the group again before they enter their
function.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.worker.exceptions.communication import is_communication_error
from taskd.worker.exceptions.text import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.worker.process.gate import Gate
    from taskd.worker.process.orders import Orders
    from taskd.worker.process.verdict import Verdict

log = logging.getLogger(__name__)


class OuterGroup:
    """One per runtime. Main thread only."""

    def __init__(
        self, rank: int, orders: Orders, gate: Gate, verdict: Verdict, *, is_of_job: bool
    ) -> None:
        """`is_of_job`: others wait for this process.

        As they do for a replacement, whether or not its script has come to its decorator, and for
        whoever has come to it.
        """
        self._rank, self._orders, self._gate, self._verdict = rank, orders, gate, verdict
        self.is_of_job = is_of_job
        self._call: Callable[[], None] | None = None
        self._is_temporary = False

    def around_init(self, call: Callable[[], None]) -> None:
        """Run an `init_process_group`.

        Outside the function it waits at the gate, and starts over if it is interrupted.
        """
        if self._orders.is_inside:
            call()
            return
        self._gate.wait(version=None, clean=True)
        while not self._attempt(call):
            self._gate.wait(version=None, clean=True)
        self._call = call

    def note_entry(self) -> None:
        """The function is entered for the first time.

        What has been destroyed by now is not wanted in later entries, either.
        """
        if self._call is None:
            return
        import torch.distributed as dist  # noqa: PLC0415

        self._is_temporary = not dist.is_initialized()

    def remake(self) -> bool:
        """Make the group of the new generation, if there was one.

        False: it broke because of others; the gate comes next.
        """
        if self._call is None:
            return True
        if not self._attempt(self._call):
            return False
        if self._is_temporary:
            import torch.distributed as dist  # noqa: PLC0415

            dist.destroy_process_group()
        return True

    def _attempt(self, call: Callable[[], None]) -> bool:
        with self._orders.condition:
            if self._orders.must_gate:  # again, since the gate: nobody else makes this group
                return False
        try:
            call()
        except RuntimeError as error:
            with self._orders.condition:
                interrupted = self._orders.must_gate
            if not interrupted:
                if not self.is_of_job or not is_communication_error(error):
                    raise
                self._verdict.await_on(error, clean=True)
            log.info("rank %d: init_process_group was interrupted: %s", self._rank, describe(error))
            return False
        return True
