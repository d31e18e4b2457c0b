"""How long 300 clients take to connect to a TCPStore, with and without libtaskd's numeric names.

    python benchmarks/store_connects.py [--clients 300] [--resolver own|silent|slow]
                                        [--limit-s 40] [--json FILE]

Each measurement is a process of its own: a store with its own client first, then so many clients.
What matters is how the resolver answers when it is asked for the name of ::ffff:127.0.0.1, the form
in which the store's sockets have the address, and which /etc/hosts lacks; that is measured too.
torch 2.13 asks twice per connection, and asks no more once an answer was an error.

--resolver (as root, with unshare): `own` takes the machine as it is. The others run in a mount
namespace with an empty /etc/hosts and a name server of this program's: `silent` never answers,
`slow` knows no name, and says so after 50 ms. A measurement that takes longer than --limit-s is
given up, and how far it came is told.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET_S = 1.0  # with the hook

# Prints a line per client, so that one that is given up has told how far it came.
CLIENTS = """
import sys, time
import torch.distributed as dist
from taskd.native.names import use_numeric_names
if sys.argv[2] == "on" and not use_numeric_names():
    sys.exit("no libtaskd: build it first (pip install, or python setup.py build_ext --inplace)")
began = time.monotonic()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(time.monotonic() - began, flush=True)
kept = []
for n in range(int(sys.argv[1])):
    kept.append(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
    print(time.monotonic() - began, flush=True)
"""
LOOK_UP = """
import socket, time
began = time.monotonic()
try:
    name = socket.getnameinfo(("::ffff:127.0.0.1", 80), 0)[0]
except OSError:
    name = "nothing"
print(name, time.monotonic() - began)
"""
# Where this program's name server listens.
SERVER = "127.9.9.9"
NAMESPACE = """
mount --make-rprivate / &&
printf '' > "$1/hosts" && mount --bind "$1/hosts" /etc/hosts &&
printf 'nameserver 127.9.9.9\\noptions timeout:5 attempts:1\\n' > "$1/resolv" &&
mount --bind "$1/resolv" "$(readlink -f /etc/resolv.conf)" &&
shift && exec "$@"
"""


def serve(*, answers: bool) -> None:
    """A name server in a thread.

    Takes questions, and says after a while that there is no such name, or nothing at all.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((SERVER, 53))

    def answer() -> None:
        while True:
            question, peer = server.recvfrom(4096)
            if answers:
                time.sleep(0.05)
                # a response, NXDOMAIN
                server.sendto(question[:2] + b"\x81\x83" + question[4:], peer)

    threading.Thread(target=answer, daemon=True).start()


def run(code: str, *words: str, prefix: list[str], limit_s: float) -> tuple[list[str], bool]:
    """The lines it printed, and whether it ended in time."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        output, ended = process.communicate(timeout=limit_s)[0], True
    except subprocess.TimeoutExpired:
        process.kill()
        output, ended = process.communicate()[0], False
    if ended and process.returncode != 0:
        raise SystemExit(f"a measurement failed with {process.returncode}")
    return output.splitlines(), ended


def main() -> int:
    """Measure and print; a missed target is a figure, not a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--resolver", choices=("own", "silent", "slow"), default="own")
    parser.add_argument("--limit-s", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as directory:
        if options.resolver != "own":
            serve(answers=options.resolver == "slow")
        prefix = (
            ["unshare", "-m", "sh", "-c", NAMESPACE, "sh", directory]
            if options.resolver != "own"
            else []
        )
        result: dict[str, object] = {
            "clients": options.clients,
            "resolver": options.resolver,
            "target_s": TARGET_S,
        }
        look_up, ended = run(LOOK_UP, prefix=prefix, limit_s=options.limit_s)
        name, seconds = look_up[0].split() if ended else ("no answer", str(options.limit_s))
        result |= {"name": name, "one_look_up_s": round(float(seconds), 4)}
        for setting in ("on", "off"):
            lines, ended = run(
                CLIENTS, str(options.clients), setting, prefix=prefix, limit_s=options.limit_s
            )
            result[f"hook_{setting}"] = {
                "connected": max(0, len(lines) - 1),
                "own_client_s": round(float(lines[0]), 3) if lines else None,
                "seconds": round(float(lines[-1]), 3) if lines else None,
                "given_up": not ended,
            }
    print(f"one look-up of ::ffff:127.0.0.1 takes {float(seconds):.4f} s here and gives {name}")
    for setting in ("on", "off"):
        print(f"hook {setting:3}: {result[f'hook_{setting}']}")
    text = json.dumps(result)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
