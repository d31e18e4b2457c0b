"""The black box of a worker: shared memory that outlives its process and tells how far it had come.

A box belongs to one incarnation of one rank. The agent creates it and hands the descriptor to the
worker; the worker writes, the agent and the worker's successor read. It is a memfd: nothing has a
name, and it is gone with the last holder.

The byte layout is documented in csrc/include/taskd.h. This module works without libtaskd, and knows
nothing of what the payloads mean. What a damaged box says is wrong, but reading it raises nothing,
and a number that cannot be one is read as not known: whatever is read here can be told to others.

A process may die between any two instructions, so each value is one aligned word that is written at
once, and each payload is marked as incomplete while it is written. What the dead process had
written is what the reader sees: the memory is the same.

Who marks remembers itself what it adds up and compares, and never reads that back: other code in
its process may write into the box by mistake, and marks are made in the middle of a training step.
The next mark puts right what it touches.
"""

import mmap
import os
import struct
import time
import weakref
from contextlib import suppress
from enum import IntEnum

from taskd.errors import NativeLibraryError
from taskd.native import box_layout as layout
from taskd.native import node_memory
from taskd.native.box_payloads import COMMITTED, MAX_COUNT, Payloads

# Offsets as word indices: the box is written through a view of signed 64-bit words, one store each.
_WORD = 8
_ALIVE_NS = layout.OFFSET_ALIVE_NS // _WORD
_PID = layout.OFFSET_PID // _WORD
_INCARNATION = layout.OFFSET_INCARNATION // _WORD
_PHASE = layout.OFFSET_PHASE // _WORD
_VERSION = layout.OFFSET_VERSION // _WORD
_GENERATION = layout.OFFSET_GENERATION // _WORD
_PROGRESS = layout.OFFSET_PROGRESS // _WORD
_PROGRESS_NS = layout.OFFSET_PROGRESS_NS // _WORD
_PYTHON_NS = layout.OFFSET_PYTHON_NS // _WORD
_WAITING = layout.OFFSET_WAITING // _WORD
_SLOWEST_NS = layout.OFFSET_SLOWEST_NS // _WORD
_SLOWEST_LONG_NS = layout.OFFSET_SLOWEST_LONG_NS // _WORD
_PHASE_NS = layout.OFFSET_PHASE_NS // _WORD
_PHASE_COUNT = layout.OFFSET_PHASE_COUNT // _WORD
_HEAD = struct.pack("=QI", layout.MAGIC, layout.LAYOUT_VERSION)  # by which a box is known
_NONE = -1  # in the box only; Python sees None
_MAX_PID = 1 << 22  # of Linux
_IN_DEBUGGER = 2
_STEPS_REMEMBERED = 256  # the longest step is that of the last one to two times so many


class Phase(IntEnum):
    """Where in its life a worker is.

    The values are in the box, the lower-case names in messages.
    """

    BOOT = 0  # started, has not entered the recoverable function
    ENTERED = 1  # in the function, no step yet
    STEP = 2  # in a training step, outside the parts that have a phase of their own
    OPTIMIZER = 3  # between optimizer.step() and commit(): the state is inconsistent
    RETURNED = 4  # the function returned, the others are waited for
    EXITING = 5  # on the way out: an end is expected
    PAUSED = 6  # left the function because of a fault, waits for the recovery
    DATA = 7  # waits for a DataLoader
    FORWARD = 8  # in the forward pass of a registered module
    BACKWARD = 9  # behind it: loss and backward pass
    COMMIT = 10
    CHECKPOINT = 11  # saving or loading a file
    EVALUATION = 12  # in a forward pass that does not train
    UNKNOWN = 15  # the box is damaged


_PHASES = {int(phase): phase for phase in Phase}
LONG_PHASES = (Phase.CHECKPOINT, Phase.EVALUATION)  # each has its own longest duration in the box
_FIRST_LONG, _LAST_LONG = int(Phase.CHECKPOINT), int(Phase.EVALUATION)  # no others in between


# What a word may be: name, index, smallest, largest.
_RANGES = (
    ("pid", _PID, 0, _MAX_PID),
    ("incarnation", _INCARNATION, 0, MAX_COUNT),
    ("phase", _PHASE, 0, max(_PHASES)),
    ("version", _VERSION, _NONE, MAX_COUNT),
    ("slot of extras", COMMITTED, _NONE, 1),
    ("generation", _GENERATION, 0, MAX_COUNT),
    *(
        (name, word, 0, (1 << 63) - 1)
        for name, word in (
            ("time of libtaskd's thread", _ALIVE_NS),
            ("marks", _PROGRESS),
            ("time of the last mark", _PROGRESS_NS),
            ("time of Python", _PYTHON_NS),
            ("longest step", _SLOWEST_NS),
            *(
                (f"longest {phase.name.lower()}", _SLOWEST_LONG_NS + index)
                for index, phase in enumerate(LONG_PHASES)
            ),
            *((f"time in {phase.name.lower()}", _PHASE_NS + phase) for phase in Phase),
            *((f"visits to {phase.name.lower()}", _PHASE_COUNT + phase) for phase in Phase),
        )
    ),
)


# Boxes that this process has open, for `_disarm_in_child` alone.
_open_boxes: "weakref.WeakSet[BlackBox]" = weakref.WeakSet()


class BlackBox(Payloads):
    """One life's box. `create` and `attach` make one; it owns its descriptor.

    One writer at a time, no locks.

    After os.fork() the child's copy is private and empty: a process that is to write must attach
    after it was forked.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(
            fd, layout.BOX_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._steps = self._step_began = self._slowest_recent = self._long_ns = 0
        self._marks = self._marked_ns = self._slowest_ns = 0
        self._marked_phase = Phase.BOOT
        self._spent_ns, self._visits = [0] * layout.PHASES, [0] * layout.PHASES
        self._slowest_long_ns = [0] * len(LONG_PHASES)
        _open_boxes.add(self)

    @classmethod
    def create(cls) -> "BlackBox":
        """A new, empty box.

        Mode 0600, closed on exec, of fixed size (a shorter file would kill its readers by SIGBUS).

        Raises:
            OSError: no descriptors, no memory, or a limit on the size of files.
        """
        fd = -1
        try:
            fd = node_memory.empty_file("taskd-black-box")
            os.ftruncate(fd, layout.BOX_BYTES)
            node_memory.seal(fd)
            box = cls(fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise OSError(
                error.errno,
                f"no black box, a file of {layout.BOX_BYTES >> 20} MiB in memory: {error.strerror}",
            ) from error
        box._words[_VERSION] = _NONE
        box._words[COMMITTED] = _NONE
        struct.pack_into("=I", box._map, layout.OFFSET_LAYOUT_VERSION, layout.LAYOUT_VERSION)
        struct.pack_into("=Q", box._map, layout.OFFSET_MAGIC, layout.MAGIC)
        return box

    @classmethod
    def attach(cls, fd: int) -> "BlackBox":
        """The box behind an inherited descriptor, which from now on belongs to the result.

        Raises:
            NativeLibraryError: it is no black box, or one of another version of taskd. The
                descriptor stays the caller's.
        """
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, len(_HEAD), 0)
        except OSError as error:
            raise NativeLibraryError(f"descriptor {fd} is no black box: {error}") from error
        if size != layout.BOX_BYTES or head != _HEAD:
            raise NativeLibraryError(
                f"descriptor {fd} is no black box of layout {layout.LAYOUT_VERSION} ({size} bytes, "
                f"starts with {head.hex()}): "
                "use one version of taskd on a node",
            )
        return cls(fd)

    # ------------------------------------------------------------ words

    @property
    def fd(self) -> int:
        """The descriptor, to be passed to the worker. -1 once closed, like that of a socket."""
        return self._fd

    @property
    def can_be_attached(self) -> bool:
        """Whether its beginning, by which it is known, has not been overwritten."""
        return self.read(0, len(_HEAD)) == _HEAD

    @property
    def pid(self) -> int | None:
        """Process that has begun its life here, if any."""
        pid = self._words[_PID]
        return pid if 0 < pid <= _MAX_PID else None

    @property
    def incarnation(self) -> int | None:
        """As told to `begin`; None: damaged."""
        return self._count(_INCARNATION)

    @property
    def damage(self) -> str | None:
        """What cannot be true in the header, for a log line; None: nothing that can be seen.

        It is read as not known.
        """
        words = self._words
        wrong = next(
            (
                (name, words[word])
                for name, word, low, high in _RANGES
                if not low <= words[word] <= high
            ),
            None,
        )
        return None if wrong is None else f"{wrong[0]} {wrong[1]}"

    def _count(self, word: int) -> int | None:
        value = self._words[word]
        return value if 0 <= value <= MAX_COUNT else None

    def _moment(self, word: int) -> float | None:
        nanoseconds = self._words[word]
        return nanoseconds / 1e9 if nanoseconds > 0 else None

    @property
    def phase(self) -> Phase:
        """The last phase that was marked."""
        return _PHASES.get(self._words[_PHASE], Phase.UNKNOWN)

    @property
    def version(self) -> int | None:
        """Number of committed steps, None while the worker holds no state, and if it is damaged."""
        return self._count(_VERSION)

    @property
    def alive_at(self) -> float | None:
        """Monotonic seconds at which libtaskd last saw the process run, to a tenth of a second.

        None: no guard.
        """
        return self._moment(_ALIVE_NS)

    @property
    def generation(self) -> int | None:
        """The one that the worker is in, as far as it has heard; None: damaged."""
        return self._count(_GENERATION)

    @property
    def progress(self) -> int:
        """Number of marks so far: whatever raises it is a sign that the main thread goes on."""
        return self._words[_PROGRESS]

    @property
    def progress_at(self) -> float | None:
        """Monotonic seconds of the last mark."""
        return self._moment(_PROGRESS_NS)

    @property
    def python_at(self) -> float | None:
        """Monotonic seconds when the runtime's Python thread last ran.

        A thread that keeps the GIL holds it up.
        """
        return self._moment(_PYTHON_NS)

    @property
    def is_waiting(self) -> bool:
        """Whether the runtime saw a collective begun and not complete."""
        return self._words[_WAITING] == 1

    @property
    def is_debugged(self) -> bool:
        """Whether the runtime saw the main thread in Python's debugger."""
        return self._words[_WAITING] == _IN_DEBUGGER

    @property
    def slowest_step_s(self) -> float:
        """The longest of the last few hundred steps, without checkpoints and evaluations.

        0: not known yet.
        """
        return max(0, self._words[_SLOWEST_NS]) / 1e9

    def slowest_long_s(self, phase: Phase) -> float:
        """The longest checkpoint or evaluation so far (`LONG_PHASES`); 0: there was none."""
        return max(0, self._words[_SLOWEST_LONG_NS + LONG_PHASES.index(phase)]) / 1e9

    def phase_times(self) -> dict[str, tuple[int, float]]:
        """By lower-case name of each phase: complete visits so far, and seconds spent in them."""
        words = self._words
        return {
            phase.name.lower(): (words[_PHASE_COUNT + phase], words[_PHASE_NS + phase] / 1e9)
            for phase in Phase
            if words[_PHASE_COUNT + phase] > 0 and words[_PHASE_NS + phase] >= 0
        }

    @property
    def marked_phase(self) -> Phase:
        """The last phase that this process has marked, whatever the box says now."""
        return self._marked_phase

    def begin(self, pid: int, incarnation: int) -> None:
        """First thing in a worker's life."""
        words = self._words
        words[_INCARNATION] = incarnation
        words[_VERSION] = _NONE
        words[_PHASE] = self._marked_phase = Phase.BOOT
        words[_PROGRESS_NS] = self._marked_ns = time.monotonic_ns()
        words[_PID] = pid

    def mark_phase(self, phase: Phase) -> None:
        """The main thread begins something else. Called several times per step."""
        words = self._words
        now = time.monotonic_ns()
        before = self._marked_phase
        took = now - self._marked_ns
        words[_PHASE_NS + before] = self._spent_ns[before] = self._spent_ns[before] + took
        words[_PHASE_COUNT + before] = self._visits[before] = self._visits[before] + 1
        if _FIRST_LONG <= before <= _LAST_LONG:
            self._long_ns += took
            index = before - _FIRST_LONG
            self._slowest_long_ns[index] = max(self._slowest_long_ns[index], took)
            words[_SLOWEST_LONG_NS + index] = self._slowest_long_ns[index]
        words[_PHASE] = self._marked_phase = phase
        words[_PROGRESS] = self._marks = self._marks + 1
        words[_PROGRESS_NS] = self._marked_ns = now

    def mark_version(self, version: int) -> None:
        """One store; the moment at which a commit becomes true for everybody who reads the box."""
        self._words[_VERSION] = version

    def mark_step(self, *, is_first: bool = False) -> None:
        """A step ends here and the next one begins.

        `is_first`: what came before was no step like the others.
        """
        words = self._words
        now = time.monotonic_ns()
        took = now - self._step_began - self._long_ns
        self._step_began, self._long_ns = now, 0
        if is_first:
            return
        self._steps += 1
        if self._steps % _STEPS_REMEMBERED == 0:
            self._slowest_ns, self._slowest_recent = self._slowest_recent, 0
        self._slowest_recent = max(self._slowest_recent, took)
        words[_SLOWEST_NS] = self._slowest_ns = max(self._slowest_ns, took)

    def mark_generation(self, generation: int) -> None:
        """A recovery: this is the generation from now on."""
        self._words[_GENERATION] = generation

    def mark_python(self, *, waiting: bool, debugged: bool = False) -> None:
        """The runtime's Python thread runs, and sees a collective begun and not complete, or none.

        Or the main thread in a debugger.
        """
        words = self._words
        words[_WAITING] = _IN_DEBUGGER if debugged else int(waiting)
        words[_PYTHON_NS] = time.monotonic_ns()

    def write_word(self, offset: int, value: int) -> None:
        """One store, for those who know the layout."""
        self._words[offset // _WORD] = value

    def read(self, offset: int, length: int) -> bytes:
        """A copy of bytes of the box, for those who know their layout."""
        return bytes(self._bytes[offset : offset + length])

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Give the memory and the descriptor back; twice is once. The other side keeps its own."""
        if self._fd < 0:
            return
        _open_boxes.discard(self)
        fd, self._fd = self._fd, -1
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(fd)

    def __del__(self) -> None:
        # the constructor failed: the descriptor is still the caller's; or the interpreter ends, and
        # functions of modules are None
        with suppress(AttributeError, TypeError):
            self.close()

    def _disarm(self) -> None:
        """Go on in private memory: what a forked child marks is not about the worker.

        The copy is not filled.
        """
        self._bytes = memoryview(mmap.mmap(-1, layout.BOX_BYTES))
        self._words = self._bytes.cast("q")


def _disarm_in_child() -> None:
    for box in list(_open_boxes):
        box._disarm()  # noqa: SLF001


# Data loaders fork the worker and may run code that marks steps; so may any library's hook.
os.register_at_fork(after_in_child=_disarm_in_child)
