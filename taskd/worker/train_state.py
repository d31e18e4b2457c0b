"""`taskd.TrainState`: the training state that survives faults, as the user sees it.

Owns the user's face: constructor, attributes, and what is asked of it too early or too late. The
objects are held by `taskd.worker.state.holding`; the order of a commit is
`taskd.worker.state.step`, that of a restore `taskd.worker.restore.restoration`. Outside a taskd job
commit() counts and restore() finds nothing.
"""

import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from taskd.config import misspelt
from taskd.errors import StateError
from taskd.log import SayOnce
from taskd.worker.life import Life, current
from taskd.worker.objects.roles import Roles, is_plain
from taskd.worker.restore.restoration import Restored, restore
from taskd.worker.saving.contents import begin_here, directory_of
from taskd.worker.saving.periodic import save
from taskd.worker.state import step
from taskd.worker.state.holding import Holding, Settings
from taskd.worker.state.phases import checkpointing

log = logging.getLogger(__name__)

_said = SayOnce()


class TrainState:
    """Everything that a training run needs to go on, in a recoverable function.

    Give it the objects by any keyword: modules, optimizers, schedulers, scalers, samplers, whatever
    has state_dict and load_state_dict; and plain values, which are attributes as well (`state.epoch
    = 3`). Call `restore()` once, before the first step, and `commit()` after every optimizer step.
    """

    _holding: Holding
    _restored: Restored | None

    def __init__(
        self,
        name: str = "train",
        *,
        shard_id: str | int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 0,
        checkpoint_keep: int = 3,
        snapshot_every: int = 0,
        snapshot_buddy: bool = False,
        **objects: Any,
    ) -> None:
        """Register the objects under `name`.

        Several TrainStates in one function need different names.

        `shard_id` is for the stages of a pipeline, however each is sharded within, and for
        frameworks that split a model into plain tensors: the same text (at most 64 bytes) or number
        on the ranks that hold the same part. Without it the part is found from DTensors, FSDP1 and
        ZeroRedundancyOptimizer. `checkpoint_dir`: where checkpoints are written and looked for,
        those of all TrainStates of the function: one of them may say it; default
        TASKD_CHECKPOINT_DIR, else ./taskd_checkpoints; relative to the working directory in which
        the first TrainState of this process was built. `checkpoint_every`: write one after so many
        commits, while training goes on (0: none), and keep the newest `checkpoint_keep`.
        `snapshot_every`: copy this rank's state into the memory of the node after so many commits
        (0: never), so that a shard that no living process has is not lost; twice the state's size
        is taken. `snapshot_buddy`: mirror these snapshots in the memory of another node on another
        host, where they outlive this one; twice the state's size is taken there, too.

        Raises:
            ValueError: `snapshot_buddy` without `snapshot_every`.
            StateError: outside a recoverable function of a taskd job, a name given twice, an object
                that cannot be carried.
        """
        life = current()
        self._check_arguments(name, objects)
        if snapshot_buddy and not snapshot_every:
            message = (
                f"TrainState({name!r}): snapshot_buddy=True mirrors snapshots, and none are "
                "made: give snapshot_every=k, too"
            )
            raise ValueError(message)
        if life is not None:
            _check_place(life, name)
        first_step = objects.pop("step", 0)
        settings = Settings(
            checkpoint_dir, checkpoint_every, checkpoint_keep, snapshot_every, snapshot_buddy
        )
        holding = Holding(name, Roles.sort(name, objects), shard_id, settings)
        _warn_of_misspelt(name, holding.roles.values)
        object.__setattr__(self, "_holding", holding)
        object.__setattr__(self, "_restored", None)
        self.step = first_step
        if life is not None:
            begin_here(life)
            life.records.states[name] = holding

    @classmethod
    def _check_arguments(cls, name: object, objects: dict[str, Any]) -> None:
        if not isinstance(name, str) or not name:
            message = (
                f"TrainState's name must be text, not {name!r}; give objects by keyword: "
                "TrainState(model=model, ...)"
            )
            raise StateError(message)
        reserved = sorted(
            role
            for role in objects
            if role.startswith("_") or (hasattr(cls, role) and role != "step")
        )
        if reserved:
            message = (
                f"TrainState({name!r}): {reserved[0]!r} is a name of TrainState's own: "
                "choose another keyword"
            )
            raise StateError(message)

    # ------------------------------------------------------------ attributes

    @property
    def step(self) -> int:
        """Number of commits of this state, in all lives together."""
        step: int = self._holding.step
        return step

    @step.setter
    def step(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            message = (
                f"TrainState({self._holding.name!r}): step must be a number of steps, not {value!r}"
            )
            raise StateError(message)
        self._holding.step = value

    @property
    def is_clean(self) -> bool:
        """False from the first write of an optimizer to the commit() after it.

        Its closure, if it has one, comes before.
        """
        return not self._holding.is_half_way

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._holding.roles.find(name)
        except KeyError:
            message = (
                f"TrainState({self._holding.name!r}) has no {name!r}: assign it, or give it "
                "to the constructor"
            )
            raise AttributeError(message) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
            return
        holding = self._holding
        if name.startswith("_") or holding.roles.is_object(name):
            message = (
                f"TrainState({holding.name!r}).{name} cannot be assigned: give objects to "
                "the constructor, in every entry anew"
            )
            raise StateError(message)
        if not is_plain(value):
            message = (
                f"TrainState({holding.name!r}).{name} = {type(value).__name__}: an "
                "attribute is a plain value (numbers, text, bytes, lists, "
                "dicts, tensors); objects with a state_dict are given to the constructor"
            )
            raise StateError(message)
        holding.roles.values[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._holding.roles.values:
            raise AttributeError(name)
        del self._holding.roles.values[name]

    # ------------------------------------------------------------ step boundary

    def commit(self) -> None:
        """Step boundary: the step is done, `step` grows by one.

        Call it right after the last optimizer step of a training step, once: each call is a step,
        also where no optimizer has stepped in between (training without gradients, a batch that is
        left out, a scaler that passes over a step).

        No copy of parameters, no message, no collective.

        Raises:
            StateError: before restore(), or on a TrainState of an earlier entry.
            taskd.Interrupted: a recovery waits for this process; let it pass.
        """
        holding, life = self._holding, current()
        if life is None:
            holding.step += 1
            return
        _check_ready(life, holding)
        step.commit(life, holding)

    def save(self, directory: str | os.PathLike[str] | None = None) -> pathlib.Path:
        """Write a checkpoint of all TrainStates of this entry now.

        Returns its folder when it is on the disk. taskd never deletes it. Every rank calls it at
        the same place, with nothing between an optimizer step and its commit(). `directory`:
        default where the periodic ones are; the next start finds it only there.

        Raises:
            StateError: outside a taskd job, before restore(), between an optimizer step and its
                commit(), or without a process group.
            taskd.errors.CheckpointError: it could not be written; nothing of it is left. On all
                ranks.
            taskd.Interrupted: a recovery waits for this process; let it pass.
        """
        holding, life = self._holding, current()
        if life is None:
            message = "save() is for a taskd job"
            raise StateError(message)
        _check_ready(life, holding)
        if life.records.is_half_way:
            message = (
                f"TrainState({holding.name!r}).save() was called between an optimizer step "
                "and its commit(): call it behind commit()"
            )
            raise StateError(message)
        if life.world_size > 1 and not dist.is_initialized():
            message = (
                f"TrainState({holding.name!r}).save(): call init_process_group() first: all "
                "ranks save together"
            )
            raise StateError(message)
        with checkpointing():
            if not directory:
                return save(life, directory_of(life, life.records.states))
            return save(life, pathlib.Path(directory).absolute())

    def on_dump(self, function: Callable[[pathlib.Path], object]) -> None:
        """Have `function(folder)` write files of your own when the job is saved since it must end.

        It is called on every rank that writes, once the state has been written; the objects hold
        the version that is saved. There is no process group: each rank writes by itself, under
        names that no other rank uses. All ranks' files are `user/` in the checkpoint in the end,
        listed in its manifest; if one of them fails, none is there. With a version from node memory
        (`snapshot_every`) it is not called.
        """
        self._holding.on_dump.append(function)

    # ------------------------------------------------------------ restore

    def restore(self) -> Restored:
        """Bring the registered objects to the newest version that the job still holds.

        Call it once, before the first step.

        In a recovery the live processes have it. At a fresh start, and if none of them has it any
        more, the newest whole checkpoint of this job is read: a dump or a periodic one. Every rank
        takes part: it needs the default process group. The objects are overwritten in place.

        Raises:
            StateError: the objects built in this entry do not fit the state; the text names the
                tensor. Or a TrainState names another `checkpoint_dir` than the one that is used.
        """
        restored: Restored | None = self._restored
        if restored is None:
            life = current()
            if life is None:
                restored = Restored(None, "nothing")
            else:
                _check_entry(life, self._holding)
                restored = restore(life, self._holding)
            object.__setattr__(self, "_restored", restored)
        return restored

    def __repr__(self) -> str:
        holding = self._holding
        return (
            f"TrainState({holding.name!r}, step={holding.step}, "
            f"{', '.join(sorted(holding.roles.object_roles()))})"
        )


def _warn_of_misspelt(name: str, values: Iterable[str]) -> None:
    """Plain values that are nearly an option: said once, as each entry has them again."""
    options = ("shard_id", *(field.name for field in fields(Settings)))
    for value, option in misspelt(values, options):
        if _said.is_new(value):
            log.warning(
                "TrainState(%r): %s is no option of it and is kept as a plain value: did you mean "
                "%s?",
                name,
                value,
                option,
            )


def _check_place(life: Life, name: str) -> None:
    """A TrainState is created in a recoverable function, under a name of its own."""
    if not life.interrupts.in_recoverable:
        message = (
            f"TrainState({name!r}) was created outside a recoverable function: put the "
            "training into a function decorated with @taskd.recoverable and create it in there"
        )
        raise StateError(message)
    if name in life.records.states:
        message = (
            f"TrainState({name!r}) was created twice in one entry: give the second one "
            f"another name, TrainState('{name}-2', ...)"
        )
        raise StateError(message)


def _check_ready(life: Life, holding: Holding) -> None:
    """Whether steps can be committed, and saved."""
    _check_entry(life, holding)
    if not holding.is_restored:
        message = f"TrainState({holding.name!r}): call restore() once before the first commit()"
        raise StateError(message)


def _check_entry(life: Life, holding: Holding) -> None:
    if life.records.states.get(holding.name) is not holding:
        message = (
            f"TrainState({holding.name!r}) belongs to an earlier entry of the recoverable "
            "function: create it anew inside the function, do not keep it in a global"
        )
        raise StateError(message)
