"""`ExceptionCheckpoint`: the call-back that saves a MindSpore training which is ended.

What is saved is always a whole step: the last one that this rank has completed. Where a step was
under way, the optimizer's own counter says whether it had begun to change the parameters; if it
had, nothing is written, since a mixture of two steps is worse than the last periodic checkpoint.

This module can be imported without MindSpore.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from mindx_elastic import breakpoint_files, calls, place
from mindx_elastic.errors import DamagedFileError, MissingFrameworkError, StepWentOnError
from mindx_elastic.progress import Progress
from mindx_elastic.termination import Termination, patience_s, stuck_after_s

if TYPE_CHECKING:
    from mindx_elastic.progress import Position

_log = logging.getLogger(__name__)
# A rank that is asked hears it after a second, waits for the end of its step, and saves.
_LISTEN_S = 1.0
_TIMES_TO_SAVE = 3.0
_classes: dict[type, type] = {}  # by the class that a script names, what is made of it


def _with_mindspore(named: type) -> type:
    """A subclass that is a call-back of MindSpore, too.

    Of ModelCheckpoint: of the last one in the list MindSpore asks whether *it* shall save when an
    exception ends the training, and this one answers that it does so itself.

    Raises MissingFrameworkError.
    """
    if named not in _classes:
        try:
            from mindspore.train.callback import ModelCheckpoint  # noqa: PLC0415
        except ImportError as error:
            raise MissingFrameworkError(
                f"{named.__name__} is a call-back of MindSpore, which cannot be imported: {error}. "
                "Install mindspore; for torch use mindx_elastic.torch_exception_module."
            ) from error
        _classes[named] = type(named.__name__, (named, ModelCheckpoint), {})
    return _classes[named]


class ExceptionCheckpoint:
    """Saves `<prefix>-<epoch>_<step>_breakpoint.ckpt` when the training is ended from outside.

    On SIGTERM always; on an exception of this rank, or of another that says so, if `config` has
    `exception_save=True`. Used as ModelCheckpoint is, and stands behind it in the list.

    The process then ends as SIGTERM ends it, or as its former handler of SIGTERM wants it. The file
    has parameters, optimizer and `append_info`, as that of ModelCheckpoint; it appears under its
    name when it is whole, with a record beside it (`….ckpt.json`).
    """

    _config: Any  # ModelCheckpoint's

    def __new__(cls, *_args: object, **_kwargs: object) -> ExceptionCheckpoint:  # noqa: PYI034 - of a subclass
        """Raises MissingFrameworkError where MindSpore cannot be imported."""
        made: ExceptionCheckpoint = object.__new__(_with_mindspore(cls))
        return made

    def __init__(self, prefix: Any = "CKP", directory: Any = None, config: Any = None) -> None:
        """The arguments of ModelCheckpoint. Raises what it raises for wrong ones."""
        super().__init__(prefix, directory, config)  # type: ignore[call-arg]
        self._files = breakpoint_files.BreakpointFiles(prefix, directory, self._config)
        self._saves_exceptions = bool(self._config.exception_save)
        self._config = breakpoint_files.without_exception_save(self._config)
        self._lock = threading.Lock()
        self._depth = 0
        self._progress: Progress | None = None
        self._termination: Termination | None = None
        self._call: calls.Calls | None = None
        self._saved_at: Position | None = None

    # What ModelCheckpoint does at these points is the business of the one before us in the list.
    def on_train_begin(self, run_context: Any) -> None:
        """Arm SIGTERM, and look what is to be saved."""
        params = run_context.original_args()
        self._progress = Progress(params)
        self._saved_at = None
        self._files.begin(params)
        self._call = calls.Calls(place.rank(), self._files.world_size)
        listens = self._saves_exceptions and self._files.world_size > 1
        self._termination = Termination(
            self._save_late, self._patience_s, is_called=self._call.has_come if listens else None
        )
        if not self._termination.arm():
            _log.warning(
                "rank %d: model.train does not run in the main thread, which alone can handle "
                "SIGTERM: it will end the training without a breakpoint file",
                place.rank(),
            )
        breakpoint_files.warn_of_others_behind(self, params)

    def on_train_step_begin(self, run_context: Any) -> None:  # noqa: ARG002
        """A step is under way."""
        if self._progress is not None:
            self._progress.begin_step()

    def on_train_step_end(self, run_context: Any) -> None:  # noqa: ARG002
        """A step is whole: the time to save, if that is wanted."""
        if self._progress is None or self._termination is None:
            return
        self._progress.end_step()
        if self._termination.is_wanted:
            self._save_and_end()

    def on_train_end(self, run_context: Any) -> None:
        """ModelCheckpoint saves once more here; this one has nothing to save."""

    def __enter__(self) -> Any:
        """A training begins, or an evaluation within one."""
        self._depth += 1
        return self

    def __exit__(self, *err: object) -> None:
        """The training is over, by itself or by an exception."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self._progress is None or self._termination is None or self._call is None:
            return
        error = err[1] if len(err) > 1 else None
        if self._termination.has_come:
            self._save_and_end()
        elif error is not None:
            self._save_exception(error, self._call)
        self._termination.disarm()
        self._progress = self._termination = None

    def _save_exception(self, error: object, call: calls.Calls) -> None:
        cause = f"{type(error).__name__}: {str(error).strip()[:200]}"
        if not self._saves_exceptions:
            _log.warning(
                "rank %d: the training ends with %s, and nothing is saved: the config has no "
                "exception_save=True",
                place.rank(),
                cause,
            )
            return
        position = self._save(cause)
        if position is not None and self._files.world_size > 1:
            call.ask(cause)
            # No signal has come, and nobody is in a hurry yet.
            call.wait(_LISTEN_S + _TIMES_TO_SAVE * stuck_after_s(self._longest_s()))

    def _save_and_end(self, *, is_late: bool = False) -> None:
        assert self._termination is not None
        cause = "SIGTERM" if self._termination.has_come else "a call of another rank"
        self._save(cause, is_late=is_late)
        self._termination.saved()
        if self._termination.has_come:
            breakpoint_files.wait_for_periodic_ones()
            self._termination.end()

    def _save_late(self) -> None:
        """In the thread of `Termination`: the main thread is stuck, or in a long step."""
        try:
            self._save_and_end(is_late=True)
        except Exception:  # noqa: BLE001 - the top of a thread: there is nobody above who could be told
            _log.exception("rank %d: the breakpoint file could not be saved", place.rank())

    def _save(self, cause: str, *, is_late: bool = False) -> Position | None:
        """The last whole step into a file, once; what prevents it is logged."""
        with self._lock:
            progress = self._progress
            if progress is None:
                return None
            if is_late and progress.position() is None and progress.is_changing:
                progress.wait_for_end(self._patience_s())  # the optimizer takes less than a step
            try:
                return self._save_last(progress, cause)
            except StepWentOnError as error:
                # Only in the thread of `Termination`: the main thread is not stuck. At the end of
                # its step it waits for our lock, so that this time nothing changes.
                _log.info("rank %d: %s: the step under way is saved instead", place.rank(), error)
                progress.wait_for_end(self._patience_s())
            try:
                return self._save_last(progress, cause)
            except StepWentOnError as error:
                self._say_unsaved(cause, error)
                return None

    def _save_last(self, progress: Progress, cause: str) -> Position | None:
        """Raises StepWentOnError."""
        position = progress.position()
        if position is None:
            _log.error(
                "rank %d: no breakpoint file is written (%s): %s. The next start goes on from an "
                "older checkpoint.",
                place.rank(),
                cause,
                progress.reason,
            )
            return None
        if position == self._saved_at:
            return position
        try:
            self._files.save(position, cause, progress)
        except (OSError, DamagedFileError, RuntimeError, ValueError, TypeError) as error:
            self._say_unsaved(cause, error)
            return None
        self._saved_at = position
        return position

    @staticmethod
    def _say_unsaved(cause: str, error: Exception) -> None:
        _log.error(
            "rank %d: the breakpoint file could not be saved (%s): %s. The next start goes on from "
            "an older checkpoint.",
            place.rank(),
            cause,
            error,
        )

    def _patience_s(self) -> float:
        return patience_s(self._longest_s())

    def _longest_s(self) -> float:
        return self._progress.longest_s if self._progress is not None else 0.0
