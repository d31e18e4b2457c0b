"""The breakpoint file of a MindSpore training, and its record.

Imports MindSpore when it saves. Knows nothing of when that is.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

from mindx_elastic import faults, files, groups, place, record
from mindx_elastic.errors import DamagedFileError, StepWentOnError
from mindx_elastic.record import Record

if TYPE_CHECKING:
    from mindx_elastic.progress import Position, Progress

_log = logging.getLogger(__name__)
ENDING = "_breakpoint.ckpt"
_DRAFT = ".mindx-breakpoint-"  # folder in which a file is written; no pattern for files fits it
_PERIODIC_THREAD = "asyn_save_ckpt"  # MindSpore's name of its thread
_PERIODIC_WAIT_S = 60.0  # a checkpoint that is being written in the background is waited for


class BreakpointFiles:
    """Where one rank's files go, and what goes into them."""

    def __init__(self, prefix: Any, directory: Any, config: Any) -> None:
        """The arguments of ExceptionCheckpoint."""
        self._prefix, self._directory, self._config = prefix, directory, config
        self._bases = {
            name: (config.append_dict or {}).get(name, 0) for name in ("epoch_num", "step_num")
        }
        self._params: Any = None
        self._began_at = ""
        self._last: str | None = None
        self.world_size = 1

    def begin(self, params: Any) -> None:
        """A training begins. Removes what an earlier one left half-written."""
        self._params = params
        self._began_at = record.now()
        self._last = None
        self.world_size = place.world_size() or params.get("device_number") or 1
        folder = self._folder()
        draft = self._draft(folder)
        if os.path.isdir(draft):
            shutil.rmtree(draft, ignore_errors=True)

    def save(self, position: Position, cause: str, progress: Progress) -> None:
        """Write the file, then its record. Raises OSError, DamagedFileError, what MindSpore raises.

        If the optimizer has begun its next step meanwhile, the file is dropped: StepWentOnError.
        """
        from mindspore.train.serialization import save_checkpoint  # noqa: PLC0415

        folder = self._folder()
        name = self._name(position)
        draft = self._draft(folder)
        os.makedirs(draft, exist_ok=True)
        try:
            written = os.path.join(draft, name)
            save_checkpoint(
                self._config.saved_network or self._params.train_network,
                written,
                integrated_save=False,  # merging shards is a collective, and a peer may be dead
                async_save=False,
                append_dict=self._append_dict(position),
                enc_key=self._config.enc_key,
                enc_mode=self._config.enc_mode,
                crc_check=self._config.crc_check,
            )
            if not progress.is_unchanged(position):
                raise StepWentOnError("the optimizer went on while the file was written")
            target = os.path.join(folder, name)
            files.publish(written, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._note(target, position, cause)
        if self._last is not None and self._last != target:
            _remove(self._last)
        self._last = target
        _log.warning("rank %d: saved %s (%s)", place.rank(), target, cause)

    def _note(self, target: str, position: Position, cause: str) -> None:
        one = Record(
            job=place.job(),
            framework="mindspore",
            rank=place.rank(),
            world_size=self.world_size,
            epoch=self._bases["epoch_num"] + position.epoch,
            step=position.step if position.counter is None else position.counter,
            state=record.SAVED,
            files=(record.saved_file(target),),
            groups=self._groups(),
            fault_ranks=_fault_ranks(),
            prefix=self._own_prefix(),
            cause=cause,
            began_at=self._began_at,
            saved_at=record.now(),
        )
        record.write(target + record.SUFFIX, one)
        record.write(place.record_path(place.rank()), one)

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same as this one: its group file says so, or the mode."""
        own = place.group_file()
        if own:
            try:
                return (groups.read(own),)
            except DamagedFileError as error:
                _log.warning("rank %d: the record names no group: %s", place.rank(), error)
                return ()
        if self._params.get("parallel_mode") in ("data_parallel", "stand_alone"):
            return (tuple(range(self.world_size)),)
        return ()

    def _append_dict(self, position: Position) -> dict[str, Any] | None:
        found = dict(self._config.append_dict or {})
        for name, value in (("epoch_num", position.epoch), ("step_num", position.step)):
            if name in found:
                found[name] = self._bases[name] + value
        return found or None

    def _name(self, position: Position) -> str:
        in_epoch = (position.step - 1) % max(1, self._params.batch_num) + 1
        return f"{self._own_prefix()}-{position.epoch}_{in_epoch}{ENDING}"

    def _own_prefix(self) -> str:
        return str(self._prefix(self._params) if callable(self._prefix) else self._prefix)

    def _folder(self) -> str:
        found = self._directory(self._params) if callable(self._directory) else self._directory
        return os.path.abspath(os.getcwd() if found is None else found)

    @staticmethod
    def _draft(folder: str) -> str:
        return os.path.join(folder, f"{_DRAFT}{place.rank()}")


def without_exception_save(config: Any) -> Any:
    """A copy for MindSpore, which then leaves exceptions to us."""
    found = copy.copy(config)
    found.exception_save = False
    return found


def warn_of_others_behind(own: Any, params: Any) -> None:
    """A ModelCheckpoint behind us in the list would save a second file."""
    behind = False
    for one in params.get("list_callback") or ():
        if one is own:
            behind = True
        elif behind and getattr(getattr(one, "_config", None), "exception_save", False):
            _log.warning(
                "rank %d: put ExceptionCheckpoint behind %s in the list of call-backs: as it is, "
                "MindSpore saves a second breakpoint file after an exception, of a step that may "
                "not be whole",
                place.rank(),
                type(one).__name__,
            )


def wait_for_periodic_ones() -> None:
    """Until MindSpore's thread has written the checkpoint that it is writing."""
    for thread in threading.enumerate():
        if thread.name == _PERIODIC_THREAD:
            thread.join(_PERIODIC_WAIT_S)


def _fault_ranks() -> tuple[int, ...]:
    try:
        return faults.read() or ()
    except DamagedFileError as error:
        _log.warning("the list of faults is not used: %s", error)
        return ()


def _remove(path: str) -> None:
    for one in (path + record.SUFFIX, path):
        try:
            os.unlink(one)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s could not be removed: %s", one, error)
