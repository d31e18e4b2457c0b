"""A checkpoint that is being written: its folder, its writers, their parts, its removal.

    every writer                                  publisher (the first of the writers)
      | makes the folder, marks itself as owner     | the same
      | __<rank>_0.distcp, on the disk              | its own part
      | rank-<rank>.json: the part is there         | all parts are there: .metadata,
                                                    | taskd.json, rename

Writers tell each other nothing but by these files, so that a writer's death cannot hold up another
one. A part that is there belongs to the publisher. Knows nothing of tensors.
"""

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from taskd.checkpoint import files, manifest, owners
from taskd.checkpoint.names import (
    Kind,
    final_name,
    job_mark,
    parse_hidden,
    partial_name,
    removed_name,
)
from taskd.errors import CheckpointError, CorruptCheckpointError
from taskd.log import SayOnce

log = logging.getLogger(__name__)

_once = SayOnce()

_OWNER = re.compile(r"(publisher|writer)-\d{1,9}-(.+)")
_PART = re.compile(r"rank-(\d{1,9})\.json")
_BEGUN = re.compile(r"(?:publisher|writer|left|rank)-(\d{1,9})(?:[-.].+)?")
_BULK = re.compile(r"__(\d{1,9})_\d{1,9}\.(?:distcp|safetensors)|user\.(\d{1,9})")
_LEFT = re.compile(r"left-\d{1,9}")
# Everything that a draft can hold. A folder with anything else in it is left alone.
_OURS = re.compile(
    r"(publisher|writer)-\d{1,9}-.+|left-\d{1,9}|rank-\d{1,9}\.json(\.new)?"
    r"|__\d{1,9}_\d{1,9}\.(distcp|safetensors)|\.metadata(\.tmp)?|taskd\.json|user(\.\d{1,9})?"
)
# each lost to one sweep that took the folder for an abandoned one while it was empty
_JOIN_TRIES = 100


@dataclass(frozen=True)
class Draft:
    """What is to become a checkpoint.

    The same on all its writers, which know it without asking each other.

    Args:
        directory: the folder that holds the job's checkpoints; made if it is missing.
        job: id of the job.
        kind: periodic or dump.
        version: number of committed steps in the state.
        attempt: stands for one series of writings by these writers, and was never used before by
            this job: for example a random text that the ranks of a generation share. Within one
            attempt each version is written once, in ascending order.
        writers: ranks that write a part. The first one publishes.
        generation: of the job, when it was written.
        world_size: number of ranks that trained.
        fault: why the job had to end, "" for a periodic checkpoint.
        states: names of the TrainStates.
    """

    directory: Path
    job: str
    kind: Kind
    version: int
    attempt: str
    writers: tuple[int, ...]
    generation: int
    world_size: int
    fault: str = ""
    states: tuple[str, ...] = ()
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        """Raises CheckpointError for writers or an attempt that cannot be."""
        if not self.writers or len(set(self.writers)) != len(self.writers):
            raise CheckpointError(
                f"job {self.job}: writers {self.writers}: expected at least one rank, each once"
            )
        object.__setattr__(
            self,
            "path",
            Path(self.directory) / partial_name(self.kind, self.version, self.job, self.attempt),
        )

    @property
    def publisher(self) -> int:
        """The rank that publishes."""
        return self.writers[0]

    def __str__(self) -> str:
        """For messages."""
        return (
            f"job {self.job}: checkpoint {final_name(self.kind, self.version)} in {self.directory}"
        )

    # ------------------------------------------------------------ writers

    def join(self, rank: int) -> None:
        """Make the folder unless it is there, and mark this process as a writer. Raises OSError."""
        role = "publisher" if rank == self.publisher else "writer"
        if not self.directory.is_dir():
            os.makedirs(self.directory, exist_ok=True)
            files.sync_folder(self.directory.parent)
        for tries_left in range(_JOIN_TRIES, -1, -1):
            with suppress(FileExistsError):
                os.mkdir(self.path)
            try:
                files.write_new(self.path / f"{role}-{rank}-{owners.myself()}", b"")
                break
            except FileNotFoundError:
                if not tries_left:
                    raise

    def hand_over(self, rank: int, part: bytes) -> None:
        """Tell the publisher that this rank's part is there, or why it never will be.

        Raises OSError.
        """
        path = self.part_path(rank)
        new = path.with_name(path.name + ".new")
        files.write_new(new, part)
        os.rename(new, path)

    def part_path(self, rank: int) -> Path:
        """The file by which a rank hands its part over."""
        return self.path / f"rank-{rank}.json"

    def is_gone(self) -> bool:
        """Whether its publisher, which had this rank's part of it, has published or removed it."""
        try:
            os.stat(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # not known
        return False

    # ------------------------------------------------------------ publisher

    def missing(self) -> list[int]:
        """Ranks whose part is not there yet.

        Raises CheckpointError: the folder is gone, another process has taken it for abandoned.
        """
        try:
            found = {
                int(match[1]) for name in os.listdir(self.path) if (match := _PART.fullmatch(name))
            }
        except OSError as error:
            raise CheckpointError(
                f"{self}: {self.path} cannot be read: {error.strerror}"
            ) from error
        return [rank for rank in self.writers if rank not in found]

    def absent(self) -> list[int]:
        """Ranks that have not begun to write. One that does makes the folder, again if need be."""
        try:
            names = os.listdir(self.path)
        except OSError:  # it is not there, most likely
            names = []
        begun = {int(match[1]) for name in names if (match := _BEGUN.fullmatch(name))}
        return [rank for rank in self.writers if rank not in begun]

    def clear(self) -> None:
        """Remove everything that must not be published. Raises OSError."""
        for name in os.listdir(self.path):
            if name not in (
                manifest.FILE_NAME,
                manifest.USER_FOLDER,
            ) and not manifest.is_file_of_checkpoint(name):
                files.remove(self.path / name)

    def give_way(self, rank: int, successor: "Draft") -> None:
        """Make room for `successor`, which this rank is about to write: this one is void.

        It goes as a whole, by one rename, unless a writer of the new one may still be writing into
        it. Then that one's part is left to it; what this rank and those that write no more have
        written goes, and their marks stay, so that the last one sees that nobody is left. Where a
        part is missing, nobody publishes. Raises nothing.
        """
        try:
            busy = {*self.missing()} & {*successor.absent()} - {rank}
            if not busy:
                self.withdraw()
                return
            for name in os.listdir(self.path):
                match = _BULK.fullmatch(name)
                owner = int(match[1] or match[2]) if match else None
                if owner is not None and (owner == rank or owner not in successor.writers):
                    files.remove(self.path / name)
        except (CheckpointError, FileNotFoundError):
            return  # another one has removed it
        except OSError as error:
            log.warning("%s: %s could not be removed: %s", self, self.path, error)

    def withdraw(self) -> None:
        """Give it up: nothing of it is left.

        When all others have begun, or when there are none any more. Raises nothing.
        """
        try:
            discard(self.path, self.kind, self.version, self.job)
        except OSError as error:
            log.warning("%s: %s could not be removed: %s", self, self.path, error)


def discard(path: Path, kind: Kind, version: int, job: str) -> None:
    """Delete a folder of ours, which need not exist. Raises OSError.

    It is renamed first: half of a checkpoint is never seen under its name.
    """
    target = path.with_name(removed_name(kind, version, job, secrets.token_hex(8)))
    with suppress(FileNotFoundError):
        os.rename(path, target)
        files.remove_folder(target)


@contextmanager
def or_left(job: str, path: Path) -> Iterator[None]:
    """What cannot be deleted is said, once, and keeps nothing else from being deleted."""
    try:
        yield
    except FileNotFoundError:
        pass  # another process has deleted it
    except OSError as error:
        what = error.filename or path  # exists: its folder may have another name by now
        if _once.is_new(job, what):
            log.warning(
                "job %s: %s cannot be deleted and is left: %s. Others are deleted. See who owns "
                "it and what is mounted there, or delete it by hand: it takes up room",
                job,
                what,
                error.strerror or error,
            )


def sweep(published: Draft) -> list[Path]:
    """Delete what dead processes of the job left unfinished, and what this publisher gave up.

    Returns what was deleted. Raises OSError: the directory cannot be read.
    """
    swept = []
    for name in sorted(os.listdir(published.directory)):
        path = Path(published.directory) / name
        with or_left(published.job, path):
            if _is_swept(published, path):
                swept.append(path)
    return swept


def _is_swept(published: Draft, path: Path) -> bool:
    """Whether it was to be deleted, and is. Raises OSError."""
    hidden, mark = parse_hidden(path.name), job_mark(published.job)
    if hidden is None or hidden.mark != mark or path.is_symlink() or not path.is_dir():
        return False
    contents = os.listdir(path)
    if not all(_OURS.fullmatch(content) for content in contents):
        return False
    if not hidden.is_partial:
        files.remove_folder(path)
        return True
    if hidden.attempt == published.attempt:
        # One publisher publishes in ascending order: an older one will not be finished. A newer
        # one may have been written by ranks that have ended since, before their publisher came
        # to it.
        is_over = hidden.kind is published.kind and hidden.version < published.version
    else:
        is_over = not contents or _is_abandoned(path, contents)
    if is_over:
        discard(path, hidden.kind, hidden.version, published.job)
    return is_over


def leave_former(draft: Draft, rank: int) -> None:
    """Say in the drafts of earlier attempts that this process, which lives, writes there no more.

    Raises OSError.
    """
    mark = f"writer-{rank}-{owners.myself()}"
    for name in os.listdir(draft.directory) if draft.directory.is_dir() else []:
        hidden = parse_hidden(name)
        is_former = (
            hidden is not None
            and hidden.is_partial
            and (hidden.mark, hidden.kind) == (job_mark(draft.job), draft.kind)
        )
        if is_former and hidden is not None and hidden.attempt != draft.attempt:
            with suppress(FileNotFoundError):  # it was not in there, or the folder is gone
                os.rename(draft.directory / name / mark, draft.directory / name / f"left-{rank}")


def _is_abandoned(path: Path, contents: list[str]) -> bool:
    """Whether nobody can publish it any more.

    Its publisher has ended, or no publisher came and all writers have ended or left.
    """
    found = list(_owners(contents))
    chosen = [owner for role, owner in found if role == "publisher"] or [
        owner for _, owner in found
    ]
    if not chosen and any(_LEFT.fullmatch(name) for name in contents):
        return True
    if not chosen and manifest.FILE_NAME in contents:
        with suppress(CorruptCheckpointError):
            chosen = [manifest.read(path).publisher]
    return bool(chosen) and all(owners.is_certainly_gone(owner) for owner in chosen)


def _owners(contents: list[str]) -> Iterator[tuple[str, str]]:
    for name in contents:
        match = _OWNER.fullmatch(name)
        if match:
            yield match[1], match[2]
