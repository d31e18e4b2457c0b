"""What libtaskd costs where it is preloaded: per hooked call, and per process that never calls it.

    python benchmarks/hooks.py [--blocks 301] [--starts 400] [--json FILE]

Calls: a C program calls a function of a stand-in library that does nothing, by turns a block of
calls under a hooked name and a block under one that is not hooked, both through the dynamic linker;
the figure is the median over blocks of the difference. Starts: /bin/true by turns with and without
the library preloaded, from a C program (posix_spawn to wait), the same way.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import measuring
from benchmarks.measuring import percentile
from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.black_box import BlackBox
from taskd.native.collectives import Collectives

TARGET_CALL_NS = 150
TARGET_START_MS = 0.3
TARGET_KB = 200
CALLS = 10_000  # per block

STAND_IN = """
#include <stddef.h>
#define SAME(name)                                                                       \\
    int name(const void *a, void *b, size_t c, int d, int e, void *f, void *g)           \\
    {                                                                                    \\
        __asm__ volatile("");                                                            \\
        return 0;                                                                        \\
    }
SAME(ncclAllReduce) SAME(plain)
"""

PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
typedef int function(const void *, void *, size_t, int, int, void *, void *);
function ncclAllReduce, plain;
int taskd_collectives_start(int) __attribute__((weak));
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
#define BLOCK(call)                                                                      \\
    do {                                                                                 \\
        double began = now();                                                            \\
        for (int i = 0; i < %(calls)d; i++) call(0, 0, 100, 7, 0, handles[i %% count], 0); \\
        printf("%%g ", (now() - began) / %(calls)d);                                     \\
    } while (0)
int main(int words, char **argv)
{
    int blocks = atoi(argv[1]), fd = atoi(argv[2]), count = atoi(argv[3]);
    function *looked_up = (function *)dlsym(dlopen("./libnccl.so.2", RTLD_NOW), "ncclAllReduce");
    if (fd >= 0 && taskd_collectives_start(fd) != 0) return 1;
    void *handles[64];
    for (int i = 0; i < 64; i++) handles[i] = (void *)(0x1000L * (i + 1));
    for (int i = 0; i < blocks; i++) {
        BLOCK(plain);
        BLOCK(ncclAllReduce);
        BLOCK(looked_up);
        puts("");
    }
    return 0;
}
"""

STARTER = """
#define _GNU_SOURCE
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static double start(char *variable)
{
    char *words[] = {"/bin/true", NULL}, *variables[] = {variable, NULL};
    pid_t child;
    int status;
    double began = now();
    if (posix_spawn(&child, words[0], NULL, NULL, words, variables) != 0) exit(1);
    if (waitpid(child, &status, 0) != child || status != 0) exit(1);
    return now() - began;
}
int main(int words, char **argv)
{
    for (int i = 0; i < atoi(argv[1]); i++) {
        double with = 0, without = 0;
        if (i % 2) with = start(argv[2]);
        without = start("NOTHING=1");
        if (i % 2 == 0) with = start(argv[2]);
        printf("%g %g\\n", without, with);
    }
    return 0;
}
"""


def compiled(directory: Path, name: str, source: str, *options: str) -> Path:
    file = directory / f"{name}.c"
    file.write_text(source)
    subprocess.run(
        ["gcc", "-O2", "-w", str(file), "-o", str(directory / name), *options],
        check=True,
        cwd=directory,
    )
    return directory / name


def table(
    command: list[str], directory: Path, preload: str = "", fds: tuple[int, ...] = ()
) -> list[list[float]]:
    """The columns of what the command prints."""
    done = subprocess.run(
        command,
        check=True,
        cwd=directory,
        pass_fds=fds,
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": preload, "LD_LIBRARY_PATH": str(directory)},
    )
    return [
        list(column)
        for column in zip(
            *([float(word) for word in line.split()] for line in done.stdout.splitlines()),
            strict=True,
        )
    ]


def calls(directory: Path, blocks: int, communicators: int, *, recorded: bool) -> dict[str, float]:
    """Nanoseconds per call beyond the plain one."""
    box = BlackBox.create()
    command = [
        str(directory / "program"),
        str(blocks),
        str(box.fd if recorded else -1),
        str(communicators),
    ]
    plain, linked, looked_up = table(command, directory, str(LIBRARY_PATH), (box.fd,))
    counted = sum(communicator.entered for communicator in Collectives(box).communicators())
    if counted != (2 * blocks * CALLS if recorded else 0):
        raise SystemExit(f"{counted} calls were recorded: the hooks are not what was measured")
    box.close()
    return {
        "communicators": communicators,
        "recorded": recorded,
        "plain_ns": round(statistics.median(plain), 1),
        "linked_ns": round(statistics.median(b - a for a, b in zip(plain, linked, strict=True)), 1),
        "looked_up_ns": round(
            statistics.median(b - a for a, b in zip(plain, looked_up, strict=True)), 1
        ),
    }


def starts(directory: Path, count: int) -> dict[str, float]:
    """Milliseconds from posix_spawn to the end of /bin/true."""
    without, with_it = table(
        [str(directory / "starter"), str(count), f"LD_PRELOAD={LIBRARY_PATH}"], directory
    )
    return {
        "starts": count,
        "without_p50_ms": round(statistics.median(without), 3),
        "with_p50_ms": round(statistics.median(with_it), 3),
        "without_p99_ms": round(percentile(without, 0.99), 3),
        "with_p99_ms": round(percentile(with_it, 0.99), 3),
        "more_p50_ms": round(
            statistics.median(b - a for a, b in zip(without, with_it, strict=True)), 3
        ),
    }


def sizes(directory: Path) -> dict[str, object]:
    """As built, and without what only a debugger reads."""
    subprocess.run(["strip", "-o", str(directory / "stripped"), str(LIBRARY_PATH)], check=True)
    listing = subprocess.run(
        ["readelf", "-d", str(LIBRARY_PATH)], check=True, capture_output=True, text=True
    ).stdout
    return {
        "bytes": LIBRARY_PATH.stat().st_size,
        "stripped_bytes": (directory / "stripped").stat().st_size,
        "needed": [
            line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line
        ],
    }


def main() -> int:
    """Measure and print.

    A missed target is a figure, not a failure: the machine may be busy with something else.
    """
    parser = measuring.parser(__doc__)
    parser.add_argument("--blocks", type=int, default=301)
    parser.add_argument("--starts", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        directory = Path(name)
        compiled(
            directory, "libnccl.so.2", STAND_IN, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"
        )
        compiled(directory, "program", PROGRAM % {"calls": CALLS}, "./libnccl.so.2", "-ldl")
        compiled(directory, "starter", STARTER)
        result = {
            "cores": os.cpu_count(),
            "kernel": os.uname().release,
            "load": os.getloadavg()[0],
            "calls": [
                calls(directory, options.blocks, count, recorded=recorded)
                for count, recorded in ((1, False), (1, True), (8, True), (64, True))
            ],
            "start": starts(directory, options.starts),
            "library": sizes(directory),
            "targets": {"call_ns": TARGET_CALL_NS, "start_ms": TARGET_START_MS, "kb": TARGET_KB},
        }
    measuring.show(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
