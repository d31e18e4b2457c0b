"""Groups: what an abort ends."""

import contextlib
import datetime as dt
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types

import pytest
from connections import pair

from taskd.errors import Interrupted
from taskd.worker.process import groups as module
from taskd.worker.process.groups import Groups
from taskd.worker.process.registered import name_ranks, registered
from taskd.worker.process.replaced import Replaced


def test_a_creation_whose_end_was_interrupted_claims_no_later_sockets(groups, monkeypatch) -> None:
    from torch.distributed import distributed_c10d

    made = []

    def interrupted(_opened) -> None:
        made.extend(pair())
        for end in made:
            end.set_inheritable(True)  # as what gloo opens
        raise Interrupted("a second time, while the first unwinds")

    monkeypatch.setattr(groups, "_finish_creation", interrupted)
    with pytest.raises(Interrupted):
        # called wrongly: it raises at once, as one that was aborted does
        distributed_c10d._new_process_group_helper()
    opened = groups.opened
    groups.retire()
    later = pair()
    groups.abort(opened)
    assert made[1].recv(1) == b"", "what the creation itself opened is shut down"
    later[0].sendall(b"x")
    assert later[1].recv(1) == b"x"
    for end in (*made, *later):
        end.close()


def test_groups_that_are_set_aside_are_still_known_and_their_abort_meets_no_later_ones(
    groups,
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        opened = groups.opened
        groups.set_aside()
        assert dist.get_rank() == 0
        later = dist.new_group([0], use_local_synchronization=True)
        own = pair()
        groups.opened.sockets.update({own[0].fileno(): "another kernel name"})
        groups.abort(opened)
        groups.abort(opened)
        dist.barrier(group=later)
        own[0].sendall(b"x")
        assert own[1].recv(1) == b"x"
        assert [len(each.groups) for each in (opened, groups.opened)] == [1, 1]
        for end in own:
            end.close()
    finally:
        groups.retire()
    assert not dist.is_initialized()


@pytest.mark.parametrize("by", ["a creation", "a destruction"])
def test_after_an_interrupt_while_torch_has_no_default_group_groups_are_made_as_ever(
    groups, monkeypatch, by: str
) -> None:
    """Their names were still registered: each further attempt was refused, and the job ended."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def interrupt(*_given) -> None:
        raise Interrupted("while torch had groups, and no default one")

    def make() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    with monkeypatch.context() as patch:
        if by == "a creation":
            patch.setattr(groups, "_finish_creation", interrupt)
        else:
            make()
            update = c10d._update_default_pg
            patch.setattr(c10d, "_update_default_pg", lambda pg: interrupt(update(pg)))
        with pytest.raises(Interrupted):
            make() if by == "a creation" else dist.destroy_process_group()
    assert not dist.is_initialized()
    (left,) = registered()
    opened = groups.opened
    groups.retire()
    groups.begin(1)
    assert opened.groups == [left], "it is kept until its threads rest"
    try:
        make()
        assert registered() == [dist.group.WORLD]
        assert dist.group.WORLD.group_name == "0"
        dist.all_reduce(torch.ones(1))
        tagged = c10d._find_pg_by_ranks_and_tag("", [0])
        assert tagged is dist.group.WORLD
    finally:
        groups.retire()


def test_a_group_is_aborted_and_kept_that_was_registered_and_not_told_of(
    groups, monkeypatch
) -> None:
    """The end of its creation was interrupted: only torch had it, which then freed it."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, register = dist.group.WORLD, c10d._register_process_group

    def interrupted(name, group) -> None:
        register(name, group)
        raise Interrupted("between two lines of torch")

    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_register_process_group", interrupted)
        with pytest.raises(Interrupted):
            dist.new_group([0])
    (left,) = [group for group in registered() if group is not world]
    aborted: list[object] = []
    monkeypatch.setattr(module, "abort_groups", lambda backends, *_: aborted.append(backends))
    opened = groups.opened
    groups.abort(opened)
    groups.retire()
    assert [*map(id, opened.groups)] == [id(world), id(left)]
    groups.abort(groups.opened)
    assert [len(backends) for backends in aborted] == [
        len(module._backends([world, left])), 0
    ], "those of the generation before are not in the next one"  # fmt: skip


def test_the_default_group_is_one_of_all_ranks_however_many_there_were_before(groups) -> None:
    """A split of any but the first one of a process ended it with SIGSEGV (torch 2.13)."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        groups.retire()
        assert options.global_ranks_in_group == [0]


def test_backends_that_have_no_options_or_no_ranks_in_them_are_left_as_they_are() -> None:
    class Refusing:
        @property
        def options(self) -> object:
            raise RuntimeError("this backend has no options")

    kept = types.SimpleNamespace(options=types.SimpleNamespace(global_ranks_in_group=[3, 5]))
    without = types.SimpleNamespace(options=types.SimpleNamespace())
    name_ranks([Refusing(), object(), without, kept], 2)
    assert kept.options.global_ranks_in_group == [3, 5]
    assert vars(without.options) == {}


def test_a_group_that_is_split_off_is_aborted_and_forgotten_as_all_are(groups, monkeypatch) -> None:
    """As those of a mesh of several dimensions are on a device: nobody knew of them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    assert device_mesh.split_group is dist.split_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cpu, world = torch.device("cpu"), dist.group.WORLD
        # torch lets gloo split where there is an accelerator
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: cpu)
        world.bound_device_id = torch.device("cpu", 0)
        options = world._get_backend(cpu).options
        split = dist.split_group(split_ranks=[[0]], pg_options=options)
        assert split is not None
        assert groups.opened.groups == [world, split]
        assert [*groups.gloo_names.values()] == [world.group_name, split.group_name]
        dist.destroy_process_group(split)
        assert groups.opened.groups == [world]
    finally:
        groups.retire()


def test_a_rank_that_is_in_no_split_has_no_group_of_it(groups) -> None:
    assert groups._watched(lambda: None)() is None
    assert groups.opened.groups == []


@pytest.mark.parametrize(("generation", "key"), [(3, "x"), (4, "taskd/4/x")])
def test_a_store_that_serves_a_later_generation_has_a_prefix(generation: int, key: str) -> None:
    import torch.distributed as dist

    base = dist.HashStore()
    groups = Groups(generation, 3)
    groups._prefixed(base).set("x", "1")
    assert base.check([key])


def test_tracebacks_have_one_prefix_however_often_the_group_was_made(groups, monkeypatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    hook = sys.excepthook
    assert hook.__name__ == "_distributed_excepthook"
    beneath = dict(
        zip(
            hook.__code__.co_freevars,
            (cell.cell_contents for cell in hook.__closure__),
            strict=True,
        )
    )["old_hook"]
    assert beneath is sys.__excepthook__


PEER = """
import sys, time
import torch.distributed as dist

real = dist.PrefixStore(sys.argv[2], dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False))

class Store(dist.Store):
    def set(self, key, value):
        real.set(key, bytes(value))

    def wait(self, keys, timeout=None):
        print("it has said where it listens", flush=True)
        time.sleep(1000)

dist.init_process_group("gloo", store=Store(), rank=1, world_size=2)
"""


def waits_in_creation(store, attempt: str) -> tuple[subprocess.Popen, threading.Thread, list[str]]:
    """A thread that makes a group with a peer which never connects, then waits for a key."""
    import torch.distributed as dist

    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(store.port), attempt], stdout=subprocess.PIPE
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"it has said where it listens\n"
    story: list[str] = []

    def create() -> None:
        try:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(attempt, store), rank=0, world_size=2
            )
            story.append("created")
        except RuntimeError:
            story.append("raised")
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            store.wait(["never"], dt.timedelta(seconds=0.5))
        story.append("slept" if time.monotonic() - began > 0.4 else "no sleep")

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    return peer, thread, story


def test_a_creation_ends_that_waits_for_a_peer_to_connect(groups) -> None:
    """It listens: there is no socket yet that could be shut down."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    # which of the two listens is decided by their ports: every second time it is this one
    for attempt in range(30):
        peer, thread, story = waits_in_creation(store, str(attempt))
        try:
            thread.join(1)
            deadline = time.monotonic() + 30
            while thread.is_alive() and time.monotonic() < deadline:
                groups.abort(groups.opened)
                thread.join(0.6)
            groups.retire()
            if story != ["created", "slept"]:
                assert story == ["raised", "slept"], (
                    "it ends, and the waits of this thread are as ever afterwards"
                )
                return
        finally:
            peer.kill()
            peer.communicate()
    pytest.fail("it never listened")


@pytest.mark.parametrize(
    ("name", "is_one"), [("pt_gloo_runloop", True), (None, True), ("pt_autograd_0", False)]
)
def test_the_threads_of_gloo_are_found_whether_torch_names_them_or_not(
    name: str | None, *, is_one: bool
) -> None:
    """torch 2.10 does not: a group whose thread waited for a peer was joined for half an hour."""
    may_end, tids = threading.Event(), []

    def wait() -> None:
        tids.append(threading.get_native_id())
        may_end.wait(30)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        while not tids:
            time.sleep(0.001)
        if name is not None:
            with open(f"/proc/self/task/{tids[0]}/comm", "w", encoding="ascii") as file:
                file.write(name)
        assert module._gloo_threads({tids[0], 1 << 22}) == (tids if is_one else [])
    finally:
        may_end.set()
        thread.join()


def open_now() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_groups_that_a_healthy_script_destroys_are_freed(groups) -> None:
    """One for each evaluation: they were kept, with their threads, until descriptors ran out.

    But for the last few: who frees one waits for its threads, and these may wait for the
    interpreter lock, which is held then, to free what the last collective has left.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for count in range(20):
            group = dist.new_group([0])
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
            assert groups._destroyed[-1] == [group]
            del group
            if count == 5:
                before = open_now()
        later = open_now()
        assert max(now - then for then, now in zip(before, later, strict=True)) <= 4
        assert groups.opened.groups == [dist.group.WORLD]
        assert list(groups.gloo_names.values()) == [dist.group.WORLD.group_name]
        dist.barrier()
    finally:
        groups.retire()


def test_without_a_name_all_groups_are_destroyed_and_none_of_another_rank(groups) -> None:
    import torch.distributed as dist

    for destroyed in (None, "WORLD"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)
        assert len(groups.opened.groups) == 2
        dist.destroy_process_group(destroyed and dist.group.WORLD)
        assert groups.opened.groups == []
        assert groups.gloo_names == {}


@pytest.mark.parametrize("by", ["an abort", "an error", "a refusal"])
def test_a_group_that_is_destroyed_while_a_step_is_left_is_kept(groups, by: str) -> None:
    """Its threads may not be at rest, and the abort is to end their waits."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    try:
        if by == "an abort":
            groups.abort(groups.opened)
            dist.destroy_process_group(group)
        elif by == "an error":
            with contextlib.suppress(RuntimeError):
                try:
                    raise RuntimeError("connection reset by peer")
                finally:
                    dist.destroy_process_group(group)
        else:
            with pytest.raises(ValueError, match="Invalid process group"):
                dist.destroy_process_group(object())
        assert groups.opened.groups == [dist.group.WORLD, group]
    finally:
        groups.retire()


def test_modules_that_were_imported_before_have_the_wrappers_too(monkeypatch) -> None:
    """As preloaded ones were: a replacement went past the gate, and its job waited for ever."""
    from torch import distributed as dist
    from torch.distributed import device_mesh
    from torch.distributed.distributed_c10d import _new_process_group_helper

    own = types.ModuleType("shared_setup")
    exec(
        "from torch.distributed import *\nfrom torch.distributed import destroy_process_group",
        vars(own),
    )
    functions = (dist.init_process_group, dist.destroy_process_group, _new_process_group_helper)
    own.begin, own.end, own.helper = functions
    for name in ("shared_setup", "no.module"):
        monkeypatch.setitem(sys.modules, name, own if name == "shared_setup" else object())
    asked: list[str] = []
    groups = Groups(1, 0)
    groups.install(lambda _: asked.append("gate"))
    try:
        assert device_mesh.init_process_group is own.begin is dist.init_process_group
        assert own.end is own.destroy_process_group is dist.destroy_process_group
        own.begin("gloo")
        assert asked == ["gate"]
        wrapped = (own.begin, own.end, own.helper)
        assert [each.__wrapped__ for each in wrapped] == [*functions]
    finally:
        groups.uninstall()
    assert (own.begin, own.end, own.helper) == functions
    assert device_mesh.init_process_group is dist.init_process_group is own.begin


def lazy_module(name: str, path: str, monkeypatch) -> types.ModuleType:
    """As `importlib.util` documents lazy imports: it is executed when something of it is read."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_no_module_is_executed_that_waits_for_its_first_use(monkeypatch, tmp_path) -> None:
    """What an optional one raised that nobody used ended the script."""
    path = tmp_path / "optional.py"
    path.write_text("raise OSError('a library of the system is missing')\n")
    lazy_module("optional", str(path), monkeypatch)

    class Pretender:
        """As proxies do: it says that it is of the class of something else."""

        __class__ = types.ModuleType  # type: ignore[assignment]

        @property
        def __dict__(self):
            pytest.fail("its code was run")

    monkeypatch.setitem(sys.modules, "pretender", Pretender())
    own = types.ModuleType("own")
    own.name = open_now
    monkeypatch.setitem(sys.modules, "own", own)
    replaced = Replaced()
    replaced.put({open_now: pair})
    assert own.name is pair
    replaced.put_back()
    assert own.name is open_now
    with pytest.raises(OSError, match="is missing"):
        _ = sys.modules["optional"].anything
