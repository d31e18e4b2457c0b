"""What a mark costs the training thread: black box alone, profiling off, profiling on.

And what the profiler's thread costs per mark.

python benchmarks/profiling.py [MARKS]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from taskd.native.black_box import BlackBox, Phase
from taskd.worker.life import Life
from taskd.worker.profiling import profiler as profiling
from taskd.worker.profiling.encoder import Encoder
from taskd.worker.profiling.marks import Profile
from taskd.worker.profiling.profiler import Profiler

PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMIT, Phase.STEP)
ROUNDS = 9


def per_call_ns(call, count: int) -> float:
    """Best of a few rounds: what disturbs only adds."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for number in range(count):
            call(PHASES[number % 6])
        found.append((time.perf_counter_ns() - began) / count)
    return min(found)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    box = BlackBox.create()
    life = Life(rank=0, world_size=1, incarnation=0, box=box)
    empty_ns = per_call_ns(lambda _phase: None, count)
    box_ns = per_call_ns(box.mark_phase, count) - empty_ns
    off_ns = per_call_ns(life.mark, count) - empty_ns

    # On, with nobody who takes the marks: the main thread's share alone.
    life.profiling.profile = Profile()
    found = []
    for _ in range(ROUNDS):
        life.profiling.profile.marks.clear()
        began = time.perf_counter_ns()
        for number in range(count):
            life.mark(PHASES[number % 6])
        found.append((time.perf_counter_ns() - began) / count)
    on_ns = min(found) - empty_ns
    assert life.profiling.profile.dropped == 0

    # The other thread's share: to lines, and to a file.
    marks = list(life.profiling.profile.marks)
    encoder = Encoder(0)
    began = time.perf_counter_ns()
    lines = "".join(encoder.mark(*mark) for mark in marks).encode()
    encode_ns = (time.perf_counter_ns() - began) / count
    life.profiling.profile = None

    # From the request to the answer, and the end of it.
    answered = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        profiling.profiling_base = lambda **_: Path(directory) / "profiles"
        profiler = Profiler(
            life.profiling, box, 0, "job", 0, directory, lambda _status: answered.set()
        )
        took = []
        for _ in range(20):
            for code in (710, 700):
                answered.clear()
                began = time.perf_counter_ns()
                profiler.switch(code)
                answered.wait(30)
                if code == 710:
                    took.append((time.perf_counter_ns() - began) / 1e6)
        profiler.close()
    print(
        json.dumps(
            {
                "marks": count,
                "black_box_ns": round(box_ns),
                "off_ns": round(off_ns),
                "off_adds_ns": round(off_ns - box_ns),
                "on_ns": round(on_ns),
                "on_adds_ns": round(on_ns - off_ns),
                "encode_ns_per_mark": round(encode_ns),
                "bytes_per_mark": round(len(lines) / count),
                "switch_on_ms": round(statistics.median(took), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
