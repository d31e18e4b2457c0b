"""Node memory that is not there: what limits it is named, and nothing is half made."""

import os
import subprocess
import sys
import textwrap

import pytest

from taskd.errors import ArenaError
from taskd.native import node_memory
from taskd.native.arena import Arena
from tests.native.programs import environment


def run(code: str, **options) -> str:
    code = (
        "from taskd.errors import ArenaError\nfrom taskd.native.arena import Arena\nimport os, "
        "resource\n"
    ) + textwrap.dedent(code)
    code += (
        "\ntry:\n    Arena.create(SHARD)\n    print('created')\nexcept ArenaError as "
        "error:\n  "
        "  print(error)\nprint(len(os.listdir('/proc/self/fd')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
        **options,
    )
    text, fds = done.stdout.splitlines()
    assert int(fds) <= 5  # three streams, the folder itself: the memfd was closed
    return text


def test_ten_terabytes_are_refused_with_what_is_wanted_and_what_is_free():
    with pytest.raises(ArenaError) as caught:
        Arena.create(10**13)
    for text in (
        "20.2 TB",
        "MemAvailable of this node leaves",
        "/dev/shm does not matter",
        "snapshot_every=0",
    ):
        assert text in str(caught.value)


def test_a_limit_on_the_size_of_files_is_named():
    text = run("SHARD = 10**7\nresource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))")
    assert "ulimit -f" in text


def test_a_limit_on_address_space_is_named():
    text = run(
        "SHARD = 10**8  # twice that is wanted, which is less than any node has\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + SHARD, used + SHARD))"
    )
    assert "ulimit -v" in text


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: makes a memory cgroup")
def test_a_memory_cgroup_refuses_instead_of_killing_and_what_fits_is_made():
    top, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
    if not os.path.exists(f"{top}/{limit}"):
        top, limit = "/sys/fs/cgroup", "memory.max"
    group = f"{top}/taskd-test-{os.getpid()}"
    try:
        os.mkdir(group)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not os.path.exists(f"{group}/{limit}"):
            pytest.skip("the memory controller is not switched on here")
        with open(f"{group}/{limit}", "w") as file:
            file.write(str(400 << 20))
        join = f"open({group!r} + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        text = run(join + "SHARD = 300 << 20")
        assert group in text
        assert "leaves" in text
        assert run(join + "SHARD = 50 << 20") == "created"
    finally:
        os.rmdir(group)


def test_the_limits_of_cgroups_are_read_in_both_versions_and_up_to_the_top(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for directory in (
        proc / "self",
        proc / "sys/vm",
        cgroups / "pod/container",
        cgroups / "memory/pod",
    ):
        directory.mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemAvailable: 500 kB\nCommitLimit: 700 kB\nCommitted_AS: 300 kB\n"
    )
    (proc / "sys/vm/overcommit_memory").write_text("2\n")
    (proc / "self/cgroup").write_text("4:cpu,memory:/pod\n0::/pod/container\n")
    (cgroups / "pod/container/memory.max").write_text("max\n")
    (cgroups / "pod/container/memory.current").write_text("5\n")
    (cgroups / "pod/memory.max").write_text("1000\n")
    (cgroups / "pod/memory.current").write_text("900\n")
    (cgroups / "pod/memory.stat").write_text("anon 5\ninactive_file 300\n")
    (cgroups / "memory/pod/memory.limit_in_bytes").write_text("2000\n")
    (cgroups / "memory/pod/memory.usage_in_bytes").write_text("1500\n")
    (cgroups / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cgroups / "memory/memory.usage_in_bytes").write_text("1500\n")
    found = {
        limit.name.split(" (")[0]: limit.free_bytes for limit in node_memory.limits(proc, cgroups)
    }
    assert found == {
        "MemAvailable of this node": 512_000,
        "CommitLimit of this node": 409_600,
        f"the memory cgroup {cgroups}/memory/pod": 500,
        f"the memory cgroup {cgroups}/pod": 400,
    }
    assert node_memory.limits(tmp_path / "nothing", cgroups) == []
