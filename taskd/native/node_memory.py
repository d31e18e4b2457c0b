"""Memory of the node for files: without a name (memfd), or in a folder of a tmpfs.

What limits it, and files whose pages are all there from the start.

The kernel hands out a page of such a file when it is first touched, and kills who touches it
(SIGBUS, or the out-of-memory killer) when there is none left. So everything is allocated at once,
in pieces, and each piece only after a look at what the node has left: other ranks allocate theirs
at the same time. What limits a memfd:

    MemAvailable of the node          its pages are memory like any other
    memory cgroups, v1 and v2         whoever allocates a page is charged for it; at the limit the
                                      kernel kills, it refuses nothing
    CommitLimit                       only where vm.overcommit_memory is 2
    RLIMIT_FSIZE, RLIMIT_AS           it is a file, and it is mapped

The size of /dev/shm does not: that is another mount. A file with a name has the size of its own
mount beside these.

Who reads a mapping behind the end of its file is killed (SIGBUS), so a file must keep its size
while anybody reads it. A memfd is sealed. A file of a tmpfs cannot be: it must be one of our own
that nobody else may open (`is_fixed`), and nobody of us makes one smaller in which an arena may
have been made: its memory is given back by a hole.

Making and clearing pages takes 0.6 s for each GB, in which other threads of Python go on: what
takes long here is either a function of os, or is called in libc by ctypes, as these release the
interpreter lock. `mmap.madvise` keeps it.
"""

import ctypes
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.errors import ArenaError

PAGE_BYTES = 4096  # of layouts; the kernel's may be larger

# allocated between two looks: about 5 ms of clearing pages, against 0.2 ms for the look
_PIECE_BYTES = 16 << 20
# Left to everybody else. A piece for each of eight ranks that look at the same moment.
_RESERVE_BYTES = 8 * _PIECE_BYTES
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes its "no limit" as a number near 2^63

# MFD_NOEXEC_SEAL: newer kernels may be set to refuse a memfd without it, older ones do not know it.
# Not in Python's os yet.
_NOEXEC_SEAL = 0x0008
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE; Python has no fallocate
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet
_NAMED_SEALS = fcntl.F_SEAL_SEAL  # of a tmpfs's files: there are none, and none can be added


@dataclass(frozen=True)
class Limit:
    """One thing that limits a file in memory, and the bytes that it leaves now."""

    name: str
    free_bytes: int


def limits(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Limit]:
    """What limits a memfd of this process, as far as it can be read."""
    found: list[Limit] = []
    meminfo = _words(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        found.append(Limit("MemAvailable of this node", meminfo["MemAvailable:"] * 1024))
    with suppress(OSError, KeyError):
        if (proc / "sys/vm/overcommit_memory").read_text().strip() == "2":
            found.append(
                Limit(
                    "CommitLimit of this node",
                    (meminfo["CommitLimit:"] - meminfo["Committed_AS:"]) * 1024,
                )
            )
    found.extend(_cgroup_limits(proc, cgroups))
    file_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit != resource.RLIM_INFINITY:
        # nobody shares it
        found.append(
            Limit("the limit on the size of files (ulimit -f)", file_limit + _RESERVE_BYTES)
        )
    address_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            used = int((proc / "self/statm").read_text().split()[0]) * resource.getpagesize()
            found.append(Limit("the limit on address space (ulimit -v)", address_limit - used))
    return found


def empty_file(name: str) -> int:
    """A memfd without a byte: mode 0600, closed on exec. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)
    os.fchmod(fd, 0o600)
    return fd


def seal(fd: int) -> None:
    """From now on the file has this size. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def fix(fd: int) -> None:
    """From now on the file has this size, see `is_fixed`.

    Raises ArenaError: it cannot be sealed.
    """
    try:
        if not is_named(fd):
            seal(fd)
    except OSError as error:
        raise ArenaError(
            f"no node memory for snapshots: a file cannot be sealed: {error.strerror}"
        ) from error


def require(wanted: int, total: int | None = None, done: int = 0, *, fd: int = -1) -> None:
    """Raises ArenaError.

    The node has not `wanted` bytes more to give, of `total` of which `done` are there. `fd`: the
    file that they are for; -1: a memfd.
    """
    total = wanted if total is None else total
    for limit in (*_mount_limits(fd), *limits()):
        if limit.free_bytes - _RESERVE_BYTES < wanted:
            so_far = f", {human(done)} of them were there when it ran out" if done else ""
            free = human(max(0, limit.free_bytes - _RESERVE_BYTES))
            raise ArenaError(
                f"no node memory for snapshots: {human(total)} ({total} bytes) are "
                f"wanted{so_far}; {limit.name} leaves {free} "
                f"beside a reserve of {human(_RESERVE_BYTES)}. {_advice(fd)}"
            )


def fill(fd: int, size: int) -> None:
    """Give an empty file `size` bytes, all allocated.

    Raises:
        ArenaError: there is not as much memory. The file is empty again.
    """
    require(size, fd=fd)
    try:
        for start in range(0, size, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, size - start)
            require(piece, size, start, fd=fd)
            os.posix_fallocate(fd, start, piece)
    except (OSError, ArenaError) as error:
        with suppress(OSError):
            os.ftruncate(fd, 0)
        if isinstance(error, OSError):
            raise ArenaError(
                f"no node memory for snapshots: {human(size)} were wanted and "
                f"refused: {error.strerror}; {_room(fd)}. {_advice(fd)}"
            ) from error
        raise


def empty(fd: int) -> None:
    """Give the memory of a file back. Raises OSError."""
    if is_sealed(fd) or is_named(fd):
        clear(fd)
    else:
        os.ftruncate(fd, 0)  # nobody has made an arena there


def clear(fd: int) -> None:
    """Give the memory of a file back, which keeps its size. Raises OSError."""
    size = os.fstat(fd).st_size
    if size:
        _call("fallocate", fd, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(size))


def populate(address: int, count: int) -> None:
    """Map all pages there, to be written. Raises OSError: it is not done, or by half."""
    _call("madvise", ctypes.c_void_p(address), ctypes.c_size_t(count), _MADV_POPULATE_WRITE)


def _call(name: str, *arguments: object) -> None:
    """A function of libc, without the interpreter lock. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def is_sealed(fd: int) -> bool:
    """Whether the file can neither shrink nor grow.

    OSError: the descriptor has no seals at all.
    """
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def is_named(fd: int) -> bool:
    """Whether it is a file of a tmpfs, which cannot be sealed.

    OSError: the descriptor has no seals at all.
    """
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _NAMED_SEALS


def is_fixed(fd: int) -> bool:
    """Whether the size of the file stays as it is: only then are reads of its mapping safe.

    OSError: it is no file in memory.
    """
    if is_sealed(fd):
        return True
    status = os.fstat(fd)
    is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0
    return is_ours and is_named(fd)


_ADVICE = (
    "Give the node or the pod more memory, raise the limit named, run fewer ranks per node, "
    "or switch snapshots off (snapshot_every=0). "
)


def _advice(fd: int) -> str:
    if fd >= 0 and is_named(fd):
        return f"{_ADVICE}What is behind TASKD_NODE_MEMORY must have room for all ranks of the node"
    return f"{_ADVICE}The size of /dev/shm does not matter"


def _mount_limits(fd: int) -> list[Limit]:
    """Of a file with a name; the others have no mount whose size counts."""
    if fd < 0 or not is_named(fd):
        return []
    mount = os.fstatvfs(fd)
    if not mount.f_blocks:  # made without a limit
        return []
    # nothing but files is charged to it: what is there can be used up
    free = mount.f_bavail * mount.f_frsize + _RESERVE_BYTES
    return [Limit("the mount behind TASKD_NODE_MEMORY", free)]


def human(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _room(fd: int) -> str:
    return "free: " + ", ".join(
        f"{human(max(0, limit.free_bytes))} by {limit.name}"
        for limit in (*_mount_limits(fd), *limits())
    )


def _words(path: Path) -> dict[str, int]:
    """Lines of a word and a number, as the kernel writes them; what cannot be read is not there."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Of the own memory cgroup and of all above it.

    In a container the path may be that of the host: then only the top is there.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = cgroups / "memory" if controllers else cgroups
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        path = Path(own.lstrip("/"))
        for part in (path, *path.parents):
            yield from _cgroup_limit(top / part, *names)
            if part == Path():
                break


def _cgroup_limit(
    directory: Path, limit_name: str, used_name: str, reclaimable_name: str
) -> Iterator[Limit]:
    try:
        limit_text = (directory / limit_name).read_text().strip()
        used = int((directory / used_name).read_text())
    except (OSError, ValueError):
        return
    if not limit_text.isdigit() or int(limit_text) >= _UNLIMITED_BYTES:
        return
    reclaimable = _words(directory / "memory.stat").get(reclaimable_name, 0)
    yield Limit(
        f"the memory cgroup {directory} (limit {human(int(limit_text))})",
        int(limit_text) - used + reclaimable,
    )
