"""The last words of a worker.

What it wrote into its black box when it crashed, when it exited, or when it was asked for its
stacks.

    worker                                   agent
    start(box)     handlers (libtaskd) ----> read(box) after the death: LastWords
                   stacks on demand    <---- request(pid, box), then wait(box, ...)

How they are written is in csrc/last_words/last_words.c. What a damaged box says is wrong, but
reading it raises nothing. Knows no ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import logging
import os
import re
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from taskd.config.signals import usable_interrupt_signal
from taskd.errors import NativeLibraryError
from taskd.native import box_layout as layout
from taskd.native import library

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 16 * 1024  # what a message carries of a traceback; about 200 lines
_NATIVE_SHARE_BYTES = 6 * 1024  # of that, for the native stack at least, if it is so long
_MARKED_AGAIN_S = 5.0  # training that went on so long after a crash: it was no end
_LOOK_S = 0.002  # between two looks at a box that is being written

_RECORD = struct.Struct("=4qQ5q")  # struct taskd_last_words up to the frames
_PYTHON, _NATIVE = b"[python]\n", b"[native]\n"
_SENT_BY_PROGRAM = {0: "SI_USER", -1: "SI_QUEUE", -6: "SI_TKILL"}
_CODES = {
    "SIGSEGV": ("SEGV_MAPERR", "SEGV_ACCERR", "SEGV_BNDERR", "SEGV_PKUERR"),
    "SIGBUS": ("BUS_ADRALN", "BUS_ADRERR", "BUS_OBJERR", "BUS_MCEERR_AR", "BUS_MCEERR_AO"),
    "SIGFPE": (
        "FPE_INTDIV", "FPE_INTOVF", "FPE_FLTDIV", "FPE_FLTOVF",
        "FPE_FLTUND", "FPE_FLTRES", "FPE_FLTINV", "FPE_FLTSUB",
    ),
    "SIGILL": (
        "ILL_ILLOPC", "ILL_ILLOPN", "ILL_ILLADR", "ILL_ILLTRP",
        "ILL_PRVOPC", "ILL_PRVREG", "ILL_COPROC", "ILL_BADSTK",
    ),
    "SIGTRAP": ("TRAP_BRKPT", "TRAP_TRACE"),
    "SIGSYS": ("SYS_SECCOMP",),
}  # fmt: skip
_KERNEL = 0x80  # SI_KERNEL: the kernel itself, without an address (general protection)


class Kind(enum.IntEnum):
    """Why something was written. The values are those of `enum taskd_words_kind`."""

    SIGNAL = 1
    EXIT = 2
    STACKS = 3


@dataclasses.dataclass(frozen=True)
class LastWords:
    """One record. `complete` False: the process ended while it wrote.

    `python` and `native` are texts of several lines, or "".
    """

    kind: Kind
    number: int  # of the signal, or the exit status
    code: int  # si_code
    address: int  # of a signal that was sent: the sender's pid
    tid: int
    thread: str
    is_main: bool
    written_at: float  # monotonic seconds
    complete: bool
    requested: int  # how many times stacks were written on demand
    detail: str  # type of an uncaught C++ exception
    frames: tuple[int, ...]
    python: str
    native: str

    @property
    def signal_name(self) -> str:
        """Name of the signal, as far as this is about one."""
        try:
            return signal.Signals(self.number).name
        except ValueError:
            return f"signal {self.number}"

    def summary(self) -> str:
        """One line: what happened, and in which thread."""
        where = "in the main thread" if self.is_main else f"in thread {self.thread or self.tid}"
        if self.kind is Kind.STACKS:
            return f"stacks on demand {where}"
        if self.kind is Kind.EXIT:
            return f"exit {self.number & 0xFF} called {where}"
        what = self.signal_name
        if self.code <= 0:
            code = _SENT_BY_PROGRAM.get(self.code, f"code {self.code}")
            # abort() and raise(); a handler that sends a signal again
            raised = what == "SIGABRT" or self.code == -6
            what += "" if raised else f" sent by process {self.address} ({code})"
        elif self.code == _KERNEL:
            what += " (SI_KERNEL)"
        else:
            known = _CODES.get(what, ())
            code = known[self.code - 1] if self.code <= len(known) else f"code {self.code}"
            what += f" at address {self.address:#x} ({code})"
        if self.detail:
            what += f", uncaught C++ exception {self.detail}"
        return f"{what} {where}"

    def text(self) -> str:
        """The stacks for a log, at most MAX_TEXT_BYTES.

        The Python thread that it is about, the native stack, the other threads.
        """
        first, _, others = self.python.partition("\n\n")
        names = self.native or "\n".join(f"[{frame:#x}]" for frame in self.frames)
        parts = []
        if names:
            shown = _cut(names, MAX_TEXT_BYTES if not first else _NATIVE_SHARE_BYTES)
            lines = (f"  {line}" for line in shown.splitlines())
            parts.append("\n".join(("Native stack (most recent call first):", *lines)))
        if first:
            room = MAX_TEXT_BYTES - sum(len(part.encode()) + 1 for part in parts)
            parts.insert(0, _cut(first, room))
        room = MAX_TEXT_BYTES - sum(len(part.encode()) + 2 for part in parts)
        if others and room > 0:
            parts.append(_cut(others, room))
        return _cut("\n".join(parts), MAX_TEXT_BYTES)


def start(box: BlackBox) -> bool:
    """Worker side, once per life, from the main thread.

    From now on a crash of this process leaves word in `box`.

    False: no libtaskd, or it refused (logged). Then an exit status is all that a crash leaves.
    """
    binding = library.load()
    if binding is None:
        return False
    _reserve_stack_of_faulthandler()
    try:
        text = binding.last_words_start(box.fd, _free_signal())
    except NativeLibraryError as error:
        log.warning("crashes of this process will leave no stacks: %s", error)
        return False
    try:
        _lend_faulthandler(binding, text)
    except (NativeLibraryError, OSError, RuntimeError) as error:
        log.warning("crashes of this process will leave no Python stacks: %s", error)
    return True


def _lend_faulthandler(binding: library.Binding, text: int) -> None:
    """Let libtaskd write Python stacks to the descriptor `text`.

    Not every CPython exports the functions for that; faulthandler makes them handlers of signals.
    The signals are free again when this returns.
    """
    numbers = []
    for all_threads in (True, False):
        number = _free_signal()
        if number == 0:
            raise NativeLibraryError("all real-time signals are in use")
        faulthandler.register(number, file=text, all_threads=all_threads, chain=False)
        numbers.append(number)
    binding.last_words_python(*numbers)


def _reserve_stack_of_faulthandler() -> None:
    """Let faulthandler install its alternate stack before we install ours.

    Its stack is small, and it installs it when it is enabled for the first time: if a script does
    that later, its handler calls ours on a stack that is too small for the unwinder.
    """
    if faulthandler.is_enabled():
        return
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        faulthandler.enable(nowhere)
        faulthandler.disable()


def _free_signal() -> int:
    """A real-time signal that nobody in this process handles or ignores; 0: there is none."""
    first = usable_interrupt_signal() - 1  # from there on upwards they are the runtime's
    taken = _signals("self", b"SigCgt") | _signals("self", b"SigIgn")
    return next((number for number in range(first, signal.SIGRTMIN, -1) if number not in taken), 0)


def _signals(pid: int | str, field: bytes) -> set[int]:
    """Numbers of the signals in a field of /proc/PID/status; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return set()
    mask = next(
        (int(line.partition(b":")[2], 16) for line in lines if line.startswith(field + b":")), 0
    )
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def read(box: BlackBox) -> LastWords | None:
    """What was written last, as far as it goes; None if nothing was, or if it makes no sense."""
    head = box.read(layout.WORDS_OFFSET_STATE, layout.LAST_WORDS_BYTES)
    state, kind, number, code, address, tid, written_ns, text_bytes, requested, frame_count = (
        _RECORD.unpack_from(head)
    )
    if state not in {1, 2} or kind not in {1, 2, 3}:
        return None
    text = box.read(layout.TEXT_OFFSET, max(0, min(text_bytes, layout.TEXT_BYTES)))
    python, native = _split(text)
    frames = struct.unpack_from(
        f"={layout.FRAMES}Q", head, layout.WORDS_OFFSET_FRAMES - layout.WORDS_OFFSET_STATE
    )
    return LastWords(
        kind=Kind(kind),
        number=number,
        code=code,
        address=address,
        tid=tid,
        thread=_text_at(head, layout.WORDS_OFFSET_THREAD, 16),
        is_main=tid == box.pid,
        written_at=written_ns / 1e9,
        complete=state == 2,
        requested=requested,
        detail=demangle(_text_at(head, layout.WORDS_OFFSET_DETAIL, 256)),
        frames=frames[: max(0, min(frame_count, layout.FRAMES))],
        python=python,
        native=native,
    )


def read_of_end(box: BlackBox) -> LastWords | None:
    """What was written about the end of the process.

    None also if training went on behind it, so that it was no end.
    """
    words = read(box)
    if words is None or words.kind is Kind.STACKS:
        return None
    went_on = (box.progress_at or 0.0) > words.written_at + _MARKED_AGAIN_S
    return None if went_on else words


def request(pid: int, box: BlackBox, *, stay: bool = False) -> int | None:
    """Ask the living worker `pid` for its stacks.

    Returns the number to `wait` for; None: it cannot tell, or it is gone.

    `stay`: its main thread is not to go on behind them. A process that is stopped answers when it
    gets SIGCONT.
    """
    number = _word(box, layout.WORDS_OFFSET_STACKS_SIGNAL)
    if box.pid != pid or not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return None
    count = _word(box, layout.WORDS_OFFSET_REQUESTED)
    box.write_word(layout.WORDS_OFFSET_STAY, int(stay))
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        # it has become another program, or uses the number itself: it would end
        if number not in _signals(pid, b"SigCgt"):
            return None
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return None
    finally:
        os.close(pidfd)
    return count + 1


def answer(box: BlackBox, count: int) -> LastWords | None:
    """The stacks, if the worker has written those that `request` numbered `count`; never blocks."""
    is_there = _word(box, layout.WORDS_OFFSET_REQUESTED) >= count
    return read(box) if is_there and _word(box, layout.WORDS_OFFSET_STATE) == 2 else None


def wait(box: BlackBox, count: int, deadline: float) -> LastWords | None:
    """`answer`, waited for until the monotonic time `deadline`.

    What was written until then, if it is about stacks; else None.
    """
    pause = threading.Event()
    while True:
        words = answer(box, count)
        if words is not None:
            return words
        if time.monotonic() >= deadline:
            words = read(box)
            is_begun = words is not None and words.kind is Kind.STACKS and not words.complete
            return words if is_begun else None
        pause.wait(_LOOK_S)


def demangle(name: str) -> str:
    """The C++ type with this mangled name if it is a plain one, else the name itself.

    "St13runtime_error" is std::runtime_error. Not __cxa_demangle(): the bytes come from a process
    that has crashed.
    """
    rest = name[1:-1] if name.startswith("N") and name.endswith("E") else name
    parts = []
    if rest.startswith("St"):
        parts, rest = ["std"], rest[2:]
    while rest:
        found = re.match(r"[1-9][0-9]{0,2}", rest)
        size = int(found[0]) if found else 0
        part = rest[len(found[0]) :][:size] if found else ""
        if len(part) != size or not re.fullmatch(r"[A-Za-z_]\w*", part, re.ASCII):
            return name
        parts.append(part)
        rest = rest[len(str(size)) + size :]
    return "::".join(parts) if parts else name


def _word(box: BlackBox, offset: int) -> int:
    return int.from_bytes(box.read(offset, 8), sys.byteorder, signed=True)


def _text_at(head: bytes, offset: int, length: int) -> str:
    start_at = offset - layout.WORDS_OFFSET_STATE
    return _printable(head[start_at : start_at + length].partition(b"\0")[0]).translate(
        {10: "?", 9: "?"}
    )


def _printable(data: bytes) -> str:
    """As text that a log line can hold: line ends stay, other control characters do not."""
    return re.sub(r"[^\n\t\x20-\x7e\u00a0-\U0010ffff]", "?", data.decode(errors="replace"))


def _split(text: bytes) -> tuple[str, str]:
    """The Python and the native part, the thread that wrote in front of the others."""
    before, mark, native = text.rpartition(b"\n" + _NATIVE)
    if not mark:
        before, native = text, b""
    python = before[len(_PYTHON) :] if before.startswith(_PYTHON) else b""
    threads = _printable(python).strip("\n").split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith(("Current thread", "Stack")))
    return "\n\n".join(threads), _printable(native).strip("\n")


def _cut(text: str, limit: int) -> str:
    """The beginning of `text`, at most `limit` bytes, in whole lines."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    mark = b"  ... (cut)"
    kept = data[: max(0, limit - len(mark) - 1)]
    return (kept.rpartition(b"\n")[0] + b"\n" + mark).decode(errors="ignore")
