"""The process groups of one generation.

Their store prefix, what their creation opened, and their retirement.

Seven functions of torch are wrapped, wherever a module has them: `rendezvous` (in a generation for
which no store was opened, the store gets the prefix taskd/<generation>, so that it does not meet
the keys of an earlier one), `_create_c10d_store` (whose way to the store can be aborted),
`_new_process_group_helper`, `split_group` and `shrink_group` (remember the group and the sockets
that its creation opened), `destroy_process_group` (forgets it) and `init_process_group` (waits at
the gate when called outside the recoverable function).

Old groups are retired, never dropped: freeing the last reference to a gloo group joins its threads
with the GIL held, while one of them may need the GIL to destroy a finished work. A group is kept
for two further generations; by then its threads have long come to rest. An operation that gloo
itself has lost is ended by `taskd.native.waits`. A group that a healthy script destroys is the
script's, and freed when torch would free it.
"""

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from taskd.native.names import use_numeric_names
from taskd.native.waits import Waits
from taskd.worker import internals
from taskd.worker.process.aborting import abort_groups, of_store, open_sockets, without_scripts
from taskd.worker.process.device import DeviceWork
from taskd.worker.process.reaching import reach
from taskd.worker.process.registered import forget_all, name_ranks, registered
from taskd.worker.process.replaced import Replaced, look_ahead

log = logging.getLogger(__name__)

# Generations for which an aborted group is kept. One would do if its threads rest by the next
# recovery; two is certain.
_GENERATIONS_KEPT = 2
_KEPT_DESTROYED = 4
_GLOO_THREAD = "pt_gloo_runloop"
# What is wrapped, by the module that has it; some versions of torch lack some of it.
_WRAPPED = {
    "torch.distributed.distributed_c10d": (
        "rendezvous",
        "init_process_group",
        "destroy_process_group",
        "_new_process_group_helper",
        "split_group",
        "shrink_group",
    ),
    "torch.distributed.rendezvous": ("_create_c10d_store",),
}


def prepare_forks() -> None:
    """Do what `Groups.install` would do in each fork of this process, as far as it can be done."""
    modules = {name: vars(sys.modules[name]) for name in _WRAPPED if name in sys.modules}
    look_ahead(
        names[name]
        for module, names in modules.items()
        for name in _WRAPPED[module]
        if name in names
    )


@dataclass
class Opened:
    """What the creation of one generation's groups opened.

    Their sockets and those of their store (fd -> kernel name), threads.
    """

    groups: list[Any] = field(default_factory=list)
    device_work: DeviceWork = field(default_factory=DeviceWork)
    sockets: dict[int, str] = field(default_factory=dict)
    store_sockets: dict[int, str] = field(default_factory=dict)
    # sockets before the creation in progress; None: none in progress
    before: dict[int, str] | None = None
    before_threads: set[int] = field(default_factory=set)  # the same of kernel threads
    creator: int = 0  # the kernel thread of the creation in progress
    # the same as `before` of a store that is being connected
    before_store: dict[int, str] | None = None
    threads: set[int] = field(default_factory=set)  # kernel threads that the creation started
    is_retired: bool = False  # torch has them no more: nobody waits in them

    @property
    def is_aborted(self) -> bool:
        """Whether nobody is to wait in any of it any more."""
        return self.device_work.is_aborted

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to abort, and nothing is being created."""
        return not self.groups and not self.store_sockets and self.before is None


class Groups:
    """Owns what torch.distributed has open in this process."""

    def __init__(self, generation: int, store_generation: int) -> None:
        """`generation`: the one that this process starts in.

        `store_generation`: the one for whose start the store was opened. It has no prefix there:
        workers without this runtime, which all start with it, must meet the others.
        """
        self.generation = generation
        self._store_generation = store_generation
        # monotonic; collectives that began before are those of earlier generations
        self.began_ns = 0
        self.created_at: float | None = None  # when the default group of this generation was ready
        self.opened = Opened()
        # of this generation: the number by which torch's records know a group -> its name
        self.gloo_names: dict[str, str] = {}
        self._gloo_count = 0  # torch numbers them in the order of creation
        self._waits: Waits | None = None
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # held while groups are aborted or destroyed
        self._under_way: dict[int, threading.Thread] = {}  # aborts, see `abort_groups`
        self._retired: list[tuple[int, Opened]] = []
        # Of the last calls of destroy_process_group.
        self._destroyed: deque[list[Any]] = deque(maxlen=_KEPT_DESTROYED)
        self._replaced = Replaced()
        # to which the rendezvous in progress has connected; None: not known
        self._store_port: int | None = None
        self._excepthook = sys.excepthook  # beneath that of torch

    def install(
        self,
        around_init: Callable[[Callable[[], None]], None],
        look_at: Callable[[Any], None] = lambda _store: None,
    ) -> None:
        """Put the wrappers into torch.

        `around_init(call)` decides when an `init_process_group` may run. `look_at` is called with
        the store that the script gives to it.
        """
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        self._waits = Waits()
        use_numeric_names()
        original_rendezvous = c10d.rendezvous
        original_init = c10d.init_process_group
        given = inspect.signature(original_init)

        @functools.wraps(original_rendezvous)
        def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
            before, self._store_port = open_sockets(), None
            for store, rank, world_size in original_rendezvous(*args, **kwargs):
                with self._lock:
                    newer = _newer(open_sockets(), before)
                    self.opened.store_sockets.update(of_store(newer, self._store_port))
                yield self._prefixed(store), rank, world_size

        @functools.wraps(original_init)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            look_at(given.bind(*args, **kwargs).arguments.get("store"))

            def make() -> None:
                self._take_hook_off()
                original_init(*args, **kwargs)
                world = c10d.GroupMember.WORLD
                name_ranks(_backends([world]), world.size())

            around_init(make)

        wrappers = {
            original_rendezvous: rendezvous,
            original_init: init_process_group,
            c10d.destroy_process_group: self._forgotten(c10d.destroy_process_group),
        }
        # by its name torch.distributed has the function of this name
        module = sys.modules["torch.distributed.rendezvous"]
        if internals.has(
            "the connection to the store",
            (module, "_create_c10d_store"),
            (module, "_torchelastic_use_agent_store"),
        ):
            wrappers[module._create_c10d_store] = self._reached(module)
        if internals.has("the creation of process groups", (c10d, "_new_process_group_helper")):
            helper = c10d._new_process_group_helper
            wrappers[helper] = self._watched(helper)
        # not by that one: out of a group that is there. Older versions lack the second.
        for name in ("split_group", "shrink_group"):
            if hasattr(c10d, name):
                wrappers[getattr(c10d, name)] = self._watched(getattr(c10d, name))
        self._replaced.put(wrappers)

    def _prefixed(self, store: Any) -> Any:
        from torch.distributed import PrefixStore  # noqa: PLC0415

        if self.generation == self._store_generation:
            return store
        return PrefixStore(f"taskd/{self.generation}", store)

    def _reached(self, module: Any) -> Callable[..., Any]:
        """`_create_c10d_store`, which an abort ends for who connects to one in a recovery."""
        original, is_agents = module._create_c10d_store, module._torchelastic_use_agent_store

        @functools.wraps(original)
        def create_c10d_store(
            hostname: str,
            port: int,
            rank: int,
            world_size: int,
            timeout: timedelta,
            *more: Any,
            **named: Any,
        ) -> Any:
            def create(timeout: timedelta) -> Any:
                store = original(hostname, port, rank, world_size, timeout, *more, **named)
                self._store_port = port
                return store

            if self.generation == self._store_generation or (rank == 0 and not is_agents()):
                return create(timeout)
            with self._lock:
                opened = self.opened
                opened.before_store = open_sockets()
            try:
                return reach(create, hostname, port, timeout, lambda: opened.is_aborted)
            finally:
                with self._lock:
                    opened.before_store = None

        return create_c10d_store

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that creates a group, which remembers it and what its creation opened."""
        from torch.distributed import GroupMember  # noqa: PLC0415

        @functools.wraps(original)
        def create_group(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                opened = self.opened
                outermost = opened.before is None
                if outermost:
                    opened.before, opened.creator = open_sockets(), threading.get_native_id()
                    opened.before_threads = _threads()
            try:
                created = original(*args, **kwargs)
                group = created[0] if isinstance(created, tuple) else created
                if group is not None and group != GroupMember.NON_GROUP_MEMBER:
                    with self._lock:
                        self._add(opened, group)
            finally:
                if outermost:
                    self._finish_creation(opened)
            self.created_at = time.monotonic()
            return created

        return create_group

    def _add(self, opened: Opened, group: Any) -> None:
        """Under the lock: a group was created, or torch has found one that was there (by a tag)."""
        if not any(each is group for each in opened.groups):
            opened.groups.append(group)
            opened.device_work.add(group)
            self._number(group)

    def _unknown(self) -> list[Any]:
        """Under the lock: groups of this generation that torch has, and nobody has told us of.

        The end of their creation was interrupted.
        """
        known = {id(group) for _, old in self._retired for group in old.groups}
        known.update(map(id, self.opened.groups))
        return [group for group in registered() if id(group) not in known]

    def _forgotten(self, original: Callable[..., None]) -> Callable[..., None]:
        """`destroy_process_group`, after which nothing here keeps what it has destroyed."""
        from torch.distributed import GroupMember  # noqa: PLC0415

        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            is_all = group is None or group == GroupMember.WORLD
            original(group)
            self._forget(None if is_all else group)

        return destroy_process_group

    def _forget(self, group: Any) -> None:
        """Torch has `group` no more; None: it has none. Nothing is forgotten if it is to end.

        Its sockets and threads are still known until they are gone: the script may hold it.
        """
        if sys.exc_info()[0] is not None:  # its threads may not be at rest: a recovery may follow
            return
        with self._lock:
            opened = self.opened
            if opened.is_aborted:
                return
            gone = [each for each in opened.groups if group is None or each is group]
            opened.groups = [each for each in opened.groups if each not in gone]
            opened.device_work.remove(gone)
            names = {each.group_name for each in gone}
            self.gloo_names = {
                number: name for number, name in self.gloo_names.items() if name not in names
            }
            opened.threads &= _threads()
        # Whoever lets go of a gloo group last joins its threads with the interpreter lock held, and
        # one of them may still have a Python object to free: both wait for ever then. So the last
        # few are kept, until their threads have been idle for long. What they push out is freed
        # without the lock, which an abort takes that ends what its threads wait for.
        self._destroyed.append(gone)

    def _take_hook_off(self) -> None:
        """Each creation prefixes tracebacks by a hook around the one before.

        A thousand of them cannot be called.
        """
        hook = sys.excepthook
        if getattr(hook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook
        else:
            self._excepthook = hook

    def _number(self, group: Any) -> None:
        # one may serve several kinds of device
        for backend in {id(backend): backend for backend in _backends([group])}.values():
            if "Gloo" in type(backend).__name__:
                self.gloo_names[str(self._gloo_count)] = group.group_name
                self._gloo_count += 1

    def uninstall(self) -> None:
        """Give torch its own functions back (tests, and forked children that are no workers)."""
        self._replaced.put_back()

    def _finish_creation(self, opened: Opened) -> None:
        with self._lock:
            self._end_creation(opened)

    def _end_creation(self, opened: Opened) -> None:
        """Under the lock.

        What is opened from here on is not the creation's, and the thread that created may wait as
        ever.
        """
        opened.sockets.update(_opened_since(opened.before or {}, opened))
        opened.threads |= _threads() - opened.before_threads  # they name themselves a moment later
        opened.before = None
        if self._waits is not None:
            self._waits.forgive([opened.creator])

    def abort(self, opened: Opened, *, with_store: bool = False) -> None:
        """From the runtime thread.

        Every collective, and a creation in progress, raises in the thread that waits in it.
        `with_store`: so does a wait in the store, where ranks meet for the first collective on a
        device.
        """
        with self._lock:
            opened.device_work.begin_abort()
            sockets = dict(opened.sockets)
            if opened.before_store is not None:
                sockets.update(_opened_since(opened.before_store, opened))
            # blocked while connecting to a peer, waiting for one to connect, or in the store
            if opened.before is not None:
                sockets.update(_opened_since(opened.before, opened))
                sockets.update(opened.store_sockets)
                if self._waits is not None:
                    self._waits.expire([opened.creator])
            if with_store and opened.device_work.is_used:
                sockets.update(opened.store_sockets)
            groups, threads = list(opened.groups), _gloo_threads(opened.threads)
            if opened is self.opened:
                groups += self._unknown()
        with self._ending:
            backends = [] if opened.is_retired else _backends(groups)
            abort_groups(backends, sockets, self._under_way)
        opened.device_work.end_abort()
        if self._waits is not None:
            self._waits.expire(threads)

    def retire(self) -> None:
        """Take the present groups out of torch and keep them until their threads rest.

        Main thread, after the unwinding.
        """
        self.set_aside()
        self.take_out()

    def take_out(self) -> None:
        """Take out of torch what was set aside."""
        import torch.distributed as dist  # noqa: PLC0415

        if not dist.is_available():
            return
        for thread in list(self._under_way.values()):
            thread.join()  # whoever waits here for too long is replaced
        with self._ending:
            self._under_way.clear()
            former = [opened for _, opened in self._retired if not opened.is_retired]
            for opened in former:
                opened.is_retired = True
            forget_all(is_on_device=any(opened.device_work.is_used for opened in former))

    def await_abort(self, limit_s: float) -> None:
        """Before `retire`, where groups on a device are to be aborted by the runtime thread."""
        self.opened.device_work.await_abort(limit_s)

    def set_aside(self) -> None:
        """The same, but torch still has them.

        An abort of theirs that is repeated does not meet what is created from here on.
        """
        with self._lock:
            for group in self._unknown():  # torch would be the last to have it, and free it
                self._add(self.opened, group)
            old, self.opened = self.opened, Opened()
            self.gloo_names = {}
            # the end of a creation was interrupted itself; sockets made from here on are not its
            # own
            if old.before is not None:
                self._end_creation(old)
        if old.groups:
            self._retired.append((self.generation, old))

    @staticmethod
    def move(address: str) -> None:
        """The ranks meet at this store, host:port, from now on: the node of theirs was lost."""
        host, _, port = address.rpartition(":")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host.strip("[]"), port
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def begin(self, generation: int) -> None:
        """A new generation: stores get its prefix from now on; what is old enough is freed."""
        self.generation, self.began_ns = generation, time.monotonic_ns()
        self.created_at = None
        if self._waits is None or not self._waits.available:
            return  # a thread that sleeps for ever could be joined: better to keep them all
        kept = []
        for retired_in, old in self._retired:
            if generation - retired_in <= _GENERATIONS_KEPT:
                kept.append((retired_in, old))
                continue
            threads = _gloo_threads(old.threads)
            self._waits.expire(threads)
            old.groups.clear()  # frees them: joins their threads
            self._waits.forgive(threads)
        self._retired = kept


def _threads() -> set[int]:
    """Kernel ids of all threads of this process."""
    return {int(entry) for entry in os.listdir("/proc/self/task")}


def _gloo_threads(candidates: set[int]) -> list[int]:
    """Those that execute gloo's collectives, by the name that torch gives them.

    Or by none: torch 2.10 does not name them, and a thread begins with the name of its creator.
    """
    names = {_GLOO_THREAD, _thread_name(os.getpid())}
    return [tid for tid in sorted(candidates) if _thread_name(tid) in names]


def _thread_name(tid: int) -> str | None:
    """None: it has ended."""
    try:
        with open(f"/proc/self/task/{tid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _newer(now: dict[int, str], before: dict[int, str]) -> dict[int, str]:
    """The sockets of `now` that were not there before."""
    return {fd: name for fd, name in now.items() if before.get(fd) != name}


def _opened_since(before: dict[int, str], opened: Opened) -> dict[int, str]:
    """The sockets of the creation in progress, or of the way to the store."""
    return without_scripts(_newer(open_sockets(), before), opened.store_sockets)


def _backends(groups: list[Any]) -> list[Any]:
    found = []
    for group in groups:
        if not internals.has(
            "the backends of process groups", (group, "_device_types"), (group, "_get_backend")
        ):
            break
        for device in group._device_types:
            try:
                found.append(group._get_backend(device))
            except RuntimeError as error:  # a device type without a backend of its own
                log.debug("no backend for %s: %s", device, error)
    return found
