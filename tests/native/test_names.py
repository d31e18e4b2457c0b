"""libtaskd lets a library's getnameinfo() ask no name server, and changes nothing else in it."""

import subprocess
import sys

import pytest

from taskd.native import library
from tests.native.programs import environment
from tests.native.stand_ins import COMMON, shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]

# Notes the flags of each call of getnameinfo(), as the last one before the C library.
SHIM = (
    COMMON
    + """
#include <netdb.h>
int flags_seen = -1;
int getnameinfo(const struct sockaddr *a, socklen_t b, char *c, socklen_t d, char *e, socklen_t f,
                int flags)
{
    flags_seen = flags;
    __typeof__(getnameinfo) *real = dlsym(RTLD_NEXT, "getnameinfo");
    return real(a, b, c, d, e, f, NI_NUMERICHOST | NI_NUMERICSERV);
}
"""
)
ASKS = (
    COMMON
    + """
#include <arpa/inet.h>
#include <netdb.h>
int ask(int flags, char *host, char *service)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(80),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return getnameinfo((struct sockaddr *)&address, sizeof address, host, 64, service, 64, flags);
}
"""
)
LOOK = """
import ctypes, sys
from taskd.native import library
asks, shim = ctypes.CDLL("./libasks.so"), ctypes.CDLL(None)
seen = ctypes.c_int.in_dll(shim, "flags_seen")
host, service = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
def flags(given):
    assert asks.ask(given, host, service) == 0
    return seen.value
def pages():
    # Neighbours with the same protection may be shown as one: page by page they are what they were.
    found = {}
    for line in open("/proc/self/maps"):
        if line.rstrip().endswith("libasks.so"):
            first, behind = (int(word, 16) for word in line.split()[0].split("-"))
            found |= {page: line.split()[1] for page in range(first, behind, 4096)}
    return found
before = pages()
print(flags(0), flags(8))
library.load().names_numeric("libasks.so")
print(flags(0), flags(8), host.value.decode(), service.value.decode(), pages() == before)
library.load().names_numeric("libasks.so")
print(flags(0))
"""
NUMERIC = 1 | 2  # NI_NUMERICHOST | NI_NUMERICSERV
NAMEREQD = 8


@pytest.mark.parametrize(
    "binding",
    [["-Wl,-z,relro,-z,now"], ["-Wl,-z,norelro,-z,lazy"], ["-Wl,-z,relro,-z,now", "-fno-plt"]],
)
def test_the_flags_are_numeric_and_the_pages_are_as_protected_as_before(tmp_path, binding):
    shim = shared(SHIM, tmp_path / "libshim.so", "-ldl")
    shared(ASKS, tmp_path / "libasks.so", *binding)
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=tmp_path,
        env={**environment(), "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"0 {NAMEREQD}",
        f"{NUMERIC} {NAMEREQD} 127.0.0.1 80 True",
        f"{NUMERIC}",
    ]


def test_a_library_that_is_not_loaded_or_asks_nobody_is_refused():
    with pytest.raises(Exception, match="No such file"):
        library.load().names_numeric("libnothere.so")
    with pytest.raises(Exception, match="Function not implemented"):
        library.load().names_numeric("libtaskd.so")


STORE = """
import ctypes, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import torch.distributed as dist
from taskd.native.names import tell_names, use_numeric_names
print(use_numeric_names(), use_numeric_names())
tell_names()
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
client.set("key", "value")
print(ctypes.c_int.in_dll(ctypes.CDLL(None), "flags_seen").value & 3, store.get("key"))
"""


@pytest.mark.parametrize(
    ("setting", "lines"),
    [
        (
            "on",
            [
                "True True",
                "torch's connections name their peers by number, no name server is asked",
                "3 b'value'",
            ],
        ),
        (
            "off",
            ["False False", "torch looks up the names of its peers: TASKD_NUMERIC_NAMES is off"],
        ),
    ],
)
def test_torch_s_store_asks_no_name_server(tmp_path, setting, lines):
    shim = shared(SHIM, tmp_path / "libshim.so", "-ldl")
    done = subprocess.run(
        [sys.executable, "-c", STORE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment(), "LD_PRELOAD": str(shim), "TASKD_NUMERIC_NAMES": setting},
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[: len(lines)] == lines
    assert found[-1] != "-1 b'value'", "torch did call getnameinfo(): else this test says nothing"
