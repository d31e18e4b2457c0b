"""Stand-ins for NCCL and HCCL, with the real names and signatures.

And programs that use them in the three ways in which programs do.

The signatures are written down from nccl.h and hccl.h, not from hooks.def: one letter per
parameter. p pointer, z size_t or uint64_t, i int or enum, u uint32_t, I ncclUniqueId by value, o
where a new communicator goes.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.collectives import Collectives
from tests.native.programs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SIGNATURES = {
    "nccl": {
        "ncclAllReduce": "ppziipp", "ncclAllGather": "ppzipp", "ncclReduceScatter": "ppziipp",
        "ncclBroadcast": "ppziipp",
        "ncclBcast": "pziipp", "ncclReduce": "ppziiipp", "ncclAlltoAll": "ppzipp",
        "ncclGather": "ppziipp",
        "ncclScatter": "ppziipp", "ncclSend": "pziipp", "ncclRecv": "pziipp", "ncclGroupStart": "",
        "ncclGroupEnd": "",
        "ncclCommInitRank": "oiIi", "ncclCommInitRankConfig": "oiIip",
        "ncclCommInitRankScalable": "oiiipp",
        "ncclCommInitAll": "pip", "ncclCommSplit": "piiop", "ncclCommAbort": "p",
        "ncclCommDestroy": "p",
    },
    "hccl": {
        "HcclAllReduce": "ppziipp", "HcclAllGather": "ppzipp", "HcclReduceScatter": "ppziipp",
        "HcclBroadcast": "pziupp",
        "HcclReduce": "ppziiupp", "HcclScatter": "ppziupp", "HcclBarrier": "pp",
        "HcclAlltoAll": "pzipzipp",
        "HcclAlltoAllV": "pppipppipp", "HcclAlltoAllVC": "ppipipp", "HcclSend": "pziupp",
        "HcclRecv": "pziupp",
        "HcclCommInitRootInfo": "upuo", "HcclCommInitRootInfoConfig": "upupo",
        "HcclCommInitClusterInfo": "puo",
        "HcclCommInitClusterInfoConfig": "pupo", "HcclCreateSubCommConfig": "pupzupo",
        "HcclCommDestroy": "p",
    },
}  # fmt: skip
TYPES = {
    "p": "void *",
    "z": "uint64_t ",
    "i": "int ",
    "u": "uint32_t ",
    "I": "struct id ",
    "o": "void **",
}
SONAMES = {"nccl": "libnccl.so.2", "hccl": "libhccl.so"}

COMMON = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct id { char bytes[128]; };
"""

# What the stand-in saw last, and what it is to answer.
SEEN = """
struct seen { char name[64]; uint64_t arguments[16]; uint64_t calls; int result; int error;
    uintptr_t next; };
"""


def parameters(letters: str) -> str:
    return ", ".join(f"{TYPES[letter]}a{n}" for n, letter in enumerate(letters)) or "void"


def word(letter: str, value: str) -> str:
    return f"*(uint64_t *){value}.bytes" if letter == "I" else f"(uint64_t){value}"


def stand_in_source(family: str, without: tuple[str, ...] = ()) -> str:
    text = (
        COMMON
        + SEEN
        + (
            "static __thread struct seen seen;\nstruct seen *stand_in_seen(void) { "
            "return &seen; }\n"
        )
    )
    for name, letters in SIGNATURES[family].items():
        if name in without:
            continue
        text += (
            f'int {name}({parameters(letters)})\n{{\n    strcpy(seen.name, "{name}");\n    '
            "seen.calls++;\n"
        )
        for n, letter in enumerate(letters):
            text += f"    seen.arguments[{n}] = {word(letter, f'a{n}')};\n"
            if letter == "o":
                text += f"    if (seen.next) *a{n} = (void *)seen.next;\n"
        text += "    errno = seen.error;\n    return seen.result;\n}\n"
    return text


# Calls every function with arguments of its own; ends the process if the stand-in did not get them,
# or the caller not its answer.
def tour_source(family: str) -> str:
    text = ""
    for number, (name, letters) in enumerate(SIGNATURES[family].items(), 1):
        arguments, wanted = [], []
        for n, letter in enumerate(letters):
            value = number * 1000 + n
            if letter == "I":
                arguments.append("an_id")
                wanted.append("*(uint64_t *)an_id.bytes")
            elif letter == "o":
                arguments.append("&made")
                wanted.append("(uint64_t)&made")
            elif letter == "p":
                arguments.append(f"(void *)(area + {value})")
                wanted.append(f"(uint64_t)(area + {value})")
            else:
                arguments.append(f"({TYPES[letter]}){value}")
                wanted.append(f"{value}")
        text += f"""
    seen->result = {5 + number}; seen->error = {100 + number}; seen->name[0] = 0; errno = 0;
    check(CALL({name})({", ".join(arguments)}) == {5 + number} && errno == {100 + number},
        "{name}: answer");
    check(strcmp(seen->name, "{name}") == 0, "{name}: called");
    {{ uint64_t wanted[] = {{0, {", ".join(wanted)}}};
      check(memcmp(wanted + 1, seen->arguments, sizeof wanted - 8) == 0, "{name}: arguments"); }}
"""
    return text


def program_source(family: str, *, looked_up: bool, body: str) -> str:
    """`run(box_fd)`: starts the record if libtaskd is preloaded, then `body`.

    CALL(name) is the function in the way that is tested.
    """
    text = COMMON + SEEN
    text += "int taskd_collectives_start(int) __attribute__((weak));\n"
    for name, letters in SIGNATURES[family].items():
        text += f"int {name}({parameters(letters)});\n"
    text += "struct seen *stand_in_seen(void);\n"
    if looked_up:
        text += (
            "static void *library;\n#define CALL(name) ((__typeof__(&name))dlsym(library, "
            f'#name))\n#define OPEN library = dlopen("{SONAMES[family]}", RTLD_NOW | '
            "RTLD_LOCAL)\n"
        )
    else:
        text += "#define CALL(name) name\n#define OPEN\n"
    return (
        text
        + f"""
static char area[4 << 20];   /* an array of as many ids as the tour says fits */
static struct seen *seen;
static void check(int is_true, const char *what) {{ if (!is_true) {{ printf("failed: %s\\n", what);
    exit(1); }} }}
{"" if "int run" in body else "int run(int box_fd)"}
{body if "int run" in body else _OPENING + START + body + chr(10) + 'puts("done"); return 0; }'}
"""
    )


_OPENING = """{ OPEN; seen = CALL(stand_in_seen)(); struct id an_id;
    memset(&an_id, 'x', sizeof an_id); void *made = NULL;
"""
START = """
    (void)area; (void)made; (void)an_id;
    if (box_fd >= 0) check(taskd_collectives_start && taskd_collectives_start(box_fd) == 0,
        "start");
"""

MAIN = (
    "int run(int);\nint main(int count, char **words) { return count > 1 ? run(atoi(words[1])) "
    ": run(-1); }\n"
)
MAIN_OF_PLUGIN = """
int main(int count, char **words)
{
    void *plugin = dlopen("./libplugin.so", RTLD_NOW | RTLD_LOCAL);
    if (!plugin) { puts(dlerror()); return 1; }
    int (*run)(int) = (int (*)(int))dlsym(plugin, "run");
    return run(count > 1 ? atoi(words[1]) : -1);
}
"""
WAYS = ("linked", "plugin", "looked_up")


def compile_c(source: str, output: Path, *options: str) -> Path:
    file = output.with_suffix(output.suffix + ".c")
    file.write_text(source)
    done = subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-w", "-pthread", str(file), "-o", str(output), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=output.parent,
    )
    assert done.returncode == 0, done.stderr
    return output


def shared(source: str, output: Path, *options: str) -> Path:
    return compile_c(source, output, "-shared", "-fPIC", f"-Wl,-soname,{output.name}", *options)


def build_stand_in(directory: Path, family: str, without: tuple[str, ...] = ()) -> Path:
    return shared(stand_in_source(family, without), directory / SONAMES[family])


def build(directory: Path, family: str, way: str, body: str) -> Path:
    """A program that runs `body`, with its stand-in beside it."""
    stand_in = build_stand_in(directory, family)
    source = program_source(family, looked_up=way == "looked_up", body=body)
    if way == "plugin":
        shared(source, directory / "libplugin.so", str(stand_in), "-Wl,-rpath,$ORIGIN")
        return compile_c(COMMON + MAIN_OF_PLUGIN, directory / "program", "-ldl")
    libraries = [str(stand_in), "-Wl,-rpath,$ORIGIN"] if way == "linked" else ["-ldl"]
    return compile_c(source + MAIN, directory / "program", *libraries)


def run(
    program: Path,
    *words: str,
    preload: str = str(LIBRARY_PATH),
    fds: tuple[int, ...] = (),
    code: int = 0,
) -> subprocess.CompletedProcess:
    """In its own directory, within a minute."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(program.parent),
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": preload,
    }
    done = subprocess.run(
        [str(program), *words],
        cwd=program.parent,
        env=environment,
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def record(box, program, **options):
    """What the black box has recorded of this program when it has ended."""
    run(program, str(box.fd), fds=(box.fd,), **options)
    return Collectives(box)
