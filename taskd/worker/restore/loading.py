"""The state from disk.

Which checkpoint, agreed by all ranks, and reading it into what the program has built.

Every rank checks its share of the files; what one of them finds damaged is passed over by all.
Knows no plan of a recovery.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from taskd.checkpoint import files, folder
from taskd.checkpoint.load import contents, load
from taskd.errors import CheckpointError, StateError
from taskd.streams import tell
from taskd.worker.objects import devices, units
from taskd.worker.saving.contents import directory_of, name_of_layouts, name_of_rank, name_of_state
from taskd.worker.state import buckets, flat
from taskd.worker.state.agreement import Agreement
from taskd.worker.state.extras import Part

if TYPE_CHECKING:
    from collections.abc import Collection

    from taskd.checkpoint.folder import Checkpoint
    from taskd.worker.life import Life
    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding


def choose(life: Life, holding: Holding) -> Checkpoint | None:
    """The newest checkpoint of this job that is whole, the same on every rank.

    None if there is none.

    Raises:
        StateError: there is one, and the ranks cannot agree on it: there is no process group yet,
            or it is not there for all of them.
    """
    directory = directory_of(life, life.records.states)
    found = folder.scan(directory, life.job_id, is_flat=False)
    if life.world_size > 1 and not dist.is_initialized():
        if not found.valid:
            return None
        message = (
            f"TrainState({holding.name!r}): call init_process_group() before restore(): "
            f"{found.valid[0].path} is there, and all ranks take the same checkpoint"
        )
        raise StateError(message)
    passed_over = list(found.passed_over)
    agreement = Agreement(life, "restore")
    for path in map(
        Path, agreement.broadcast([str(checkpoint.path) for checkpoint in found.valid])
    ):
        checkpoint, problem = _check(path, life)
        problems = agreement.gather(problem)
        if not problems and checkpoint is not None:
            if life.world_rank == 0:
                _warn_if_exposed(directory, path)
                manifest = checkpoint.manifest
                _say(
                    f"restoring step {manifest.version} of job {life.job_id} from {path}: the "
                    f"newest whole checkpoint, a {manifest.kind.value} one, saved by "
                    f"{len(manifest.writers)} of {manifest.world_size} ranks at "
                    f"{manifest.saved_at}{_skipped(passed_over)}"
                )
            return checkpoint
        passed_over.append((path, problems[0]))
    if passed_over and life.world_rank == 0:
        _say(
            f"starting afresh: no whole checkpoint of job {life.job_id} in "
            f"{directory}{_skipped(passed_over)}"
        )
    return None


def check_directory(life: Life, *, is_first: bool) -> None:
    """Whether all TrainStates have their checkpoints where the first restore() has looked.

    `is_first`: that is this one.

    Raises:
        StateError: one of them says otherwise. What it saves would not be found.
    """
    states, saving = life.records.states, life.saving
    if is_first or saving.directory is None:
        saving.directory = directory_of(life, states)
    for name, holding in states.items():
        given = holding.settings.checkpoint_dir
        own = directory_of(life, {name: holding})
        if given is None or own.resolve() == saving.directory.resolve():
            continue
        message = (
            f"TrainState({name!r}): checkpoint_dir={os.fspath(given)!r} is another directory than "
            f"{saving.directory}, where checkpoints are looked for: each has all TrainStates of a "
            "function. Give the same directory to all of them, and build the TrainState that names "
            "it before the first restore()"
        )
        raise StateError(message)


def _warn_if_exposed(directory: Path, path: Path) -> None:
    exposed = folder.exposure(directory, path)
    if exposed is not None:
        _say(f"the checkpoint is not safe: {exposed}")


def read(life: Life, holding: Holding, named: Named, checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the checkpoint into the holding's objects.

    Returns what this rank had to itself, {} if the world is another one.

    Raises:
        StateError: the objects are others than those that were saved.
        CheckpointError: it cannot be read after all.
    """
    held = contents(checkpoint.path)
    name = name_of_state(holding)
    if name not in held.values:
        raise StateError(_not_in(checkpoint, holding, held.values))
    own_name, layouts = name_of_rank(life.world_rank), name_of_layouts(life.records.states.values())
    is_same_world = checkpoint.manifest.world_size == life.world_size
    values = load(
        checkpoint.path,
        {},
        [name, *(other for other in (own_name, layouts) if is_same_world and other in held.values)],
    )
    plain = values[name]
    plain["values"] = devices.beside(plain["values"], holding.roles.values)
    targets = flat.targets(holding, named, plain, held.tensors)
    flat.place_memories(named, plain)
    load(checkpoint.path, targets, ())
    flat.load(holding, named, plain, targets)
    if layouts in values:
        buckets.reinstate(life, values[layouts])
    own: dict[str, Any] = values.get(own_name, {})
    if own:
        values_of_rank = own["values"].get(holding.name, plain["values"])
        holding.load_part(
            Part(
                devices.beside(values_of_rank, holding.roles.values),
                own["positions"].get(holding.name, {}),
                own["buffers"].get(holding.name, {}),
            ),
            named,
        )
    elif is_same_world and holding.name == checkpoint.manifest.states[0]:
        _say(
            f"rank {life.rank}: {checkpoint.path} has no RNG and sampler state of this rank, which "
            "was lost with its node: it goes on with those that the script sets, and may read "
            "some data again"
        )
    return own


def _check(path: Path, life: Life) -> tuple[Checkpoint | None, str]:
    """Look at this rank's share of the files."""
    try:
        checkpoint = folder.check(path, life.job_id)
        for file in checkpoint.manifest.files[life.world_rank :: life.world_size]:
            files.check_content(path / file.name, file.size_bytes, file.sha256, path)
    except (CheckpointError, OSError) as error:
        return None, f"rank {life.rank}: {error}"
    return checkpoint, ""


def _not_in(checkpoint: Checkpoint, holding: Holding, names: Collection[str]) -> str:
    """Why the state is not found in a checkpoint with these names.

    FSDP1's parts are for the same number of ranks, and the same units.
    """
    part = f" with shard_id {holding.shard_id!r}" if holding.shard_id else ""
    text = (
        f"TrainState({holding.name!r}){part} is not in {checkpoint.path}, which holds "
        f"{', '.join(checkpoint.manifest.states)}"
    )
    bare = name_of_state(holding).removesuffix(f"@{holding.shard_id}")
    others = sorted(name.removeprefix(f"{bare}@") for name in names if name.startswith(f"{bare}@"))
    if others:
        text += (f" with shard_id {others[0]!r}") + (
            f" and {len(others) - 1} more" if others[1:] else ""
        )
    if units.has_any(holding.roles.modules.values()) or any(
        units.is_place(other) for other in others
    ):
        text += (
            ". A shard of FullyShardedDataParallel can be read by the same shard alone: sharded "
            "over as many ranks, wrapped in the same way. Start the job as it was saved, by "
            f"{checkpoint.manifest.world_size} ranks; nothing was changed or deleted. What "
            "fully_shard has sharded can be read by any number of ranks"
        )
    return text


def _skipped(passed_over: list[tuple[Path, str]]) -> str:
    return "".join(f"; passed over {path.name}: {reason}" for path, reason in passed_over)


def _say(text: str) -> None:
    """To the user, in every case: the log of a training process is the script's."""
    tell(f"taskd: {text}\n")
