"""Profiling in one training process.

The main thread leaves marks, a thread of its own turns them into lines of JSON.

    main thread ── Profile.mark, .step ──►  deque  ──┐
                                                     ├──►  thread "taskd-profile"  ──►  file
    black box's ring of collectives ─────────────────┘

The thread exists only while something is profiled, because a disk may block for seconds and the
runtime thread must not. What the main thread does is append one tuple; if the disk stalls and
the deque is full, marks are dropped and counted. What goes wrong here is reported as status
"exception" and logged once: training goes on.
"""

import atexit
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from taskd.config import profiling_base
from taskd.core.profiling import Domain, Domains, asked_by, status_of
from taskd.native import library
from taskd.native.black_box import BlackBox
from taskd.worker.profiling.calls import CallReader
from taskd.worker.profiling.encoder import Encoder
from taskd.worker.profiling.files import ProfileFiles
from taskd.worker.profiling.marks import Profile, Switches

log = logging.getLogger(__name__)

BUFFER_BYTES = 2 * 1024 * 1024
FLUSH_S = 5.0
TRIM_S = 60.0
_ENCODE_S = 1.0  # marks are few: a dozen per step
_RING_S = 0.1  # the ring holds 256 calls
_END_S = 1.0  # that an exit waits for the last lines

_DEVICE_BACKENDS = ("nccl", "hccl")

_OFF = Domains(Domain.OFF, Domain.OFF)


class Profiler:
    """See the module.

    `switch` is for the runtime thread and never blocks; `close` is for the end of the process.
    """

    def __init__(
        self,
        switches: Switches,
        box: BlackBox | None,
        rank: int,
        job_id: str,
        local_rank: int,
        directory: str,
        report: Callable[[int], None],
    ) -> None:
        """`directory`: what a relative path of the settings refers to.

        `report`: gets a status, from any thread.
        """
        self._switches, self._box, self._rank = switches, box, rank
        self._job_id = job_id
        self._local_rank = local_rank
        self._directory = directory
        self._report = report
        self._pid = os.getpid()
        self._lock = threading.Lock()  # for what is asked for, and for the life of the thread
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted = _OFF
        # how often something was asked for, and for how many of those there is an answer
        self._asked = self._answered = 0
        # All below: the thread's own.
        self._profile = Profile()
        self._encoder = Encoder(local_rank)
        self._files: ProfileFiles | None = None
        self._calls: CallReader | None = None
        self._state = _OFF
        self._is_backend_known = False
        self._lines: list[str] = []
        self._bytes = 0
        self._flush_at = self._trim_at = 0.0
        self._problem = ""
        self._dropped_said = self._lost_said = 0
        atexit.register(self.close)

    # ------------------------------------------------------------------ other threads

    def switch(self, code: int) -> None:
        """Do what the manager wants. An answer follows.

        The same again tries again what did not work.
        """
        try:
            wanted = asked_by(code)
        except ValueError as error:
            log.warning(
                "rank %d: profiling was asked for in a way that is not known: %s",
                self._rank,
                error,
            )
            return
        with self._lock:
            self._wanted = wanted
            self._asked += 1
            if wanted.default is Domain.OFF:
                self._switches.profile = None  # at once, whatever the disk does
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="taskd-profile", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads
                    self._thread = None
                    self._fail(str(error))
                    self._answer()
            self._wake.set()

    def close(self) -> None:
        """Write what there is, and end. Waits for a slow disk for a moment only."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            thread, self._wanted = self._thread, _OFF
            self._switches.profile = None
        self._wake.set()
        if thread is not None:
            thread.join(_END_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                wanted, asked = self._wanted, self._asked
            try:
                if asked != self._answered:
                    self._apply(wanted)
                self._turn(wanted)
            except OSError as error:
                self._fail(f"{self._path()}: {error.strerror or error}")
            # the top of the thread: whatever it is must neither harm nor be silent
            except Exception as error:
                log.exception(
                    "rank %d: a bug in taskd, please report it: profiling stops", self._rank
                )
                self._fail(repr(error))
            is_idle = (
                Domain.ON not in (self._state.default, self._state.communication) or wanted == _OFF
            )
            if is_idle:
                self._stop()
            if asked != self._answered:
                self._answered = asked
                self._answer()
            with self._lock:
                if self._asked == asked and is_idle:
                    self._thread = None
                    return
            self._wake.wait(_RING_S if self._calls is not None else _ENCODE_S)

    def _answer(self) -> None:
        self._report(status_of(self._state))

    def _path(self) -> str:
        return "profile" if self._files is None else self._files.path

    def _apply(self, wanted: Domains) -> None:
        """Begin and end what is wanted."""
        if wanted == _OFF:
            self._state = wanted  # the caller stops
            return
        if self._files is None:
            self._files = ProfileFiles(
                self._base(),
                self._job_id,
                self._rank,
                lambda: self._encoder.head(self._job_id, self._rank),
            )
            self._files.open()
            now = time.monotonic()
            self._flush_at, self._trim_at = now + FLUSH_S, now
            self._problem = ""
            log.info("rank %d: profiling into %s", self._rank, self._files.path)
        default = wanted.default
        if default is Domain.ON:
            self._switches.profile = self._profile
        else:
            self._drain()
            self._encoder.forget()
        self._state = Domains(default, self._begin_calls(wanted.communication))

    def _begin_calls(self, wanted: Domain) -> Domain:
        if wanted is Domain.OFF:
            self._calls, self._switches.wants_calls = None, False
            return wanted
        self._is_backend_known = False
        if self._box is None or self._lacks_preload():
            self._calls = None
            return Domain.EXCEPTION
        self._calls = self._calls or CallReader(self._box)
        self._switches.wants_calls = True
        return wanted

    def _lacks_preload(self) -> bool:
        """Whether the collectives of this process go by unseen.

        The backend may not be known yet: then asked again.
        """
        if self._is_backend_known:
            return False
        backend = _backend()
        self._is_backend_known = bool(backend)
        return any(name in backend for name in _DEVICE_BACKENDS) and not library.require_preloaded(
            "profiling of communication"
        )

    def _turn(self, wanted: Domains) -> None:
        """Take in what there is, write if it is time."""
        if self._files is None:
            return
        self._drain()
        if self._calls is not None:
            self._read_calls(self._calls)
            if self._lacks_preload():
                self._calls, self._state = None, Domains(self._state.default, Domain.EXCEPTION)
                self._answer()
        now = time.monotonic()
        if now >= self._flush_at or self._bytes >= BUFFER_BYTES:
            self._flush()
            self._flush_at = now + FLUSH_S
        if now >= self._trim_at and wanted != _OFF:
            self._trim()

    def _drain(self) -> None:
        marks, encode = self._profile.marks, self._encoder.mark
        for _ in range(len(marks)):
            self._add(encode(*marks.popleft()))

    def _read_calls(self, reader: CallReader) -> None:
        begun, ended = reader.read()
        names = reader.communicators() if begun else {}
        for call in begun:
            self._add(self._encoder.begin(call, names))
        for call in ended:
            self._add(self._encoder.end(call))

    def _add(self, lines: str) -> None:
        if lines:
            self._lines.append(lines)
            self._bytes += len(lines)
            if self._bytes >= BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        assert self._files is not None
        lines, self._lines, self._bytes = self._lines, [], 0
        if lines and self._files.write("".join(lines).encode()):
            self._trim()
        self._say_losses()

    def _trim(self) -> None:
        assert self._files is not None
        self._trim_at = time.monotonic() + TRIM_S
        removed = self._files.trim(self._switches.limit_mb)
        if removed:
            log.info(
                "rank %d: the profiling folder is above %d MB, %d old files were removed",
                self._rank,
                self._switches.limit_mb,
                removed,
            )

    def _say_losses(self) -> None:
        dropped, lost = self._profile.dropped, self._calls.lost if self._calls is not None else 0
        if dropped > self._dropped_said:
            log.info(
                "rank %d: %d marks were dropped so far, the disk of %s is too slow",
                self._rank,
                dropped,
                self._path(),
            )
        if lost > self._lost_said:
            log.debug(
                "rank %d: %d collectives came too fast to be profiled so far", self._rank, lost
            )
        self._dropped_said, self._lost_said = dropped, lost

    def _stop(self) -> None:
        """Write the rest and close. Raises nothing."""
        self._switches.profile = None
        if self._files is not None:
            try:
                self._drain()
                if self._calls is not None:
                    self._read_calls(self._calls)
                self._flush()
            except OSError as error:
                log.info(
                    "rank %d: the last lines of the profile were not written: %s",
                    self._rank,
                    error,
                )
            self._files.close()
        self._files = self._calls = None
        self._switches.wants_calls = False
        self._encoder.forget()
        self._profile.marks.clear()
        self._lines, self._bytes = [], 0

    def _fail(self, problem: str) -> None:
        """Nothing can be written: stop, say so once, and wait to be asked again."""
        if self._files is not None:
            self._files.close()
        self._files = self._calls = self._switches.profile = None
        self._switches.wants_calls = False
        self._encoder.forget()
        self._profile.marks.clear()
        self._lines, self._bytes = [], 0
        was_on = Domain.ON in (self._state.default, self._state.communication)
        wanted = self._wanted
        self._state = Domains(
            *(
                Domain.OFF if one is Domain.OFF else Domain.EXCEPTION
                for one in (wanted.default, wanted.communication)
            )
        )
        if problem != self._problem:
            self._problem = problem
            log.warning(
                "rank %d: profiling does not work: %s. Training goes on; it is tried again "
                "when the manager asks again",
                self._rank,
                problem,
            )
        if was_on and self._asked == self._answered:  # nobody has asked just now
            self._answer()

    def _base(self) -> pathlib.Path:
        return profiling_base(directory=self._directory)


def _backend() -> str:
    """Of the default group; "" while there is none.

    Asked from a thread of ours while the script may make or destroy it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        return (
            str(distributed.get_backend())
            if distributed is not None and distributed.is_initialized()
            else ""
        )
    except Exception:  # noqa: BLE001
        return ""
