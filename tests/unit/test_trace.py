"""Profiles of ranks become one trace.

Valid in the Trace Event Format, aligned in time, whatever the files are like.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskd import trace
from taskd.native.black_box import Phase
from taskd.native.collectives import Call
from taskd.worker.profiling.encoder import Encoder

if TYPE_CHECKING:
    import pathlib

S = 1_000_000_000


def line(
    flag: int,
    at: int,
    mark_id: int,
    name: str = "Step",
    domain: str = "default",
    pid: int = 1,
    **more: object,
) -> str:
    return (
        json.dumps(
            {
                "Kind": 1,
                "Flag": flag,
                "SourceKind": 0,
                "Timestamp": at,
                "Id": mark_id,
                "MsptiObjectId": {
                    "Pt": {"ProcessId": pid, "ThreadId": pid},
                    "Ds": {"DeviceId": 0, "StreamId": 0},
                },
                "Name": name,
                "Domain": domain,
                **more,
            }
        )
        + "\n"
    )


def clock(at: int, offset: int, host: str = "host") -> str:
    return line(
        1,
        at,
        0,
        "clock",
        "taskd",
        Clock={"OffsetNs": offset, "Host": host, "Job": "job", "Rank": 0},
    )


def write(folder: pathlib.Path, rank: int, seconds: int, *lines: str) -> pathlib.Path:
    path = folder / str(rank) / str(seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def merged(folder: pathlib.Path) -> tuple[list[dict], trace.Merger]:
    merger = trace.write_trace(folder, folder.parent / "trace.json")
    document = json.loads((folder.parent / "trace.json").read_text())
    check_format(document)
    return document["traceEvents"], merger


def check_format(document: dict) -> None:
    """What the Trace Event Format asks of the object form, of metadata and of events."""
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in ("ms", "ns")
    busy: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "i")
        assert type(event["pid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert isinstance(event["args"].get("name", ""), str)
            named.add((event["name"], event["pid"], event.get("tid")))
            continue
        assert type(event["tid"]) is int
        assert isinstance(event["cat"], str)
        assert isinstance(event["args"], dict)
        assert isinstance(event["ts"], float)
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["dur"] >= 0
            busy.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for pid, tid in busy:
        assert ("process_name", pid, None) in named
        assert ("thread_name", pid, tid) in named


def ranges(events: list[dict]) -> list[tuple]:
    return [
        (event["pid"], event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    ]


def test_a_process_per_rank_and_a_thread_per_domain(tmp_path: pathlib.Path) -> None:
    for rank in (0, 1, 10):
        write(
            tmp_path / "job",
            rank,
            100,
            clock(100 * S, 90 * S),
            line(2, 101 * S, 1, Version=7),
            line(2, 101 * S + 5, 2, "FP"),
            line(4, 102 * S, 2, "FP"),
            line(4, 103 * S, 1),
            line(2, 101 * S, 3, "ncclAllReduce", "communication", Call={"Bytes": 8}),
            line(4, 102 * S, 3, "ncclAllReduce", "communication"),
        )
    events, merger = merged(tmp_path / "job")
    assert ranges(events)[:3] == [
        (0, "FP", 1_000_000.005, 999_999.995),
        (0, "Step", 1_000_000.0, 2_000_000.0),
        (0, "ncclAllReduce", 1_000_000.0, 1_000_000.0),
    ]
    assert merger.events == 9
    assert not +merger.skipped
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
        "rank 10",
    ]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "default",
        "communication",
    }
    step = next(event for event in events if event["ph"] == "X" and event["name"] == "Step")
    assert step["args"]["version"] == 7


def test_a_range_may_begin_in_one_file_and_end_in_the_next(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "job", 0, 9, clock(0, 0), line(2, 10, 1))
    write(tmp_path / "job", 0, 10, clock(20, 0), line(4, 30, 1))
    events, _ = merged(tmp_path / "job")
    assert ranges(events) == [(0, "Step", 0.01, 0.02)]


def test_files_of_one_host_are_put_on_one_clock(tmp_path: pathlib.Path) -> None:
    """The time of day was set back by 50 s between the two files.

    The monotonic clock knows nothing of it.
    """
    write(
        tmp_path / "job", 0, 100, clock(100 * S, 90 * S), line(2, 101 * S, 1), line(4, 102 * S, 1)
    )
    write(tmp_path / "job", 1, 60, clock(51 * S, 40 * S), line(2, 51 * S, 1), line(4, 52 * S, 1))
    write(
        tmp_path / "job",
        2,
        60,
        clock(101 * S, 5, "another"),
        line(2, 101 * S, 1),
        line(4, 102 * S, 1),
    )
    events, _ = merged(tmp_path / "job")
    at = {pid: ts for pid, _, ts, _ in ranges(events)}
    assert at[0] == at[1]
    document = json.loads((tmp_path / "trace.json").read_text())
    assert int(document["otherData"]["originUnixNs"]) == 50 * S
    assert at[2] == 51 * S / 1000


def test_collectives_that_overlap_get_threads_of_their_own(tmp_path: pathlib.Path) -> None:
    write(
        tmp_path / "job",
        0,
        1,
        *(line(2, 10 * number, number, "send", "communication") for number in range(5)),
        *(line(4, 100 + number, number, "send", "communication") for number in range(5)),
        line(2, 200, 9, "send", "communication"),
        line(4, 201, 9, "send", "communication"),
    )
    events, _ = merged(tmp_path / "job")
    found = [event for event in events if event["ph"] == "X"]
    assert len({event["tid"] for event in found[:5]}) == 5
    assert found[5]["tid"] == found[0]["tid"]


def test_what_cannot_be_used_is_counted_and_the_rest_is_there(
    tmp_path: pathlib.Path, capsys
) -> None:
    path = write(
        tmp_path / "job",
        0,
        1,
        line(4, 5, 77),
        line(2, 10, 1),
        "not json\n",
        "[1]\n",
        "{}\n",
        line(2, 12, 1),
        '{"Name": "x", "Domain": "y", "Flag": true, "Timestamp": 1, "Id": 1}\n',
        line(2, 1, 5).replace('"Id": 5', '"Id": 1e400'),
        line(99, 12, 8),
        line(4, 20, 1),
        line(2, 30, 2),
        line(4, 29, 2),
        "x" * 200_000 + "\n",
        line(2, 40, 3),
        line(4, 50, 3),
        line(2, 60, 4),
        "[" * 30_000 + "\n",
        line(1, 61, 0, "hello"),
    )
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n" + line(4, 70, 3).encode()[:40])
    write(tmp_path / "job", 1, 1)
    (tmp_path / "job" / "0" / "parallel_group.json").write_text("{}")
    assert trace.main([str(tmp_path / "job"), "-o", str(tmp_path / "trace.json")]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [
        "skipped: 8 lines that are cut off or no marks",
        "skipped: 1 lines that are too long",
        "skipped: 1 marks of other kinds",
        "skipped: 1 ranges that begin twice",
        "skipped: 1 ranges that end before they begin",
        "skipped: 1 ranges without a beginning",
        "skipped: 1 ranges without an end",
    ]
    document = json.loads((tmp_path / "trace.json").read_text())
    check_format(document)
    assert [(name, duration) for _, name, _, duration in ranges(document["traceEvents"])] == [
        ("Step", 0.008),
        ("Step", 0.01),
    ]


def test_two_lives_of_a_rank_do_not_mix(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "job", 0, 1, line(2, 10, 1, pid=5))
    write(tmp_path / "job", 0, 2, line(2, 20, 1, pid=6), line(4, 30, 1, pid=6))
    events, merger = merged(tmp_path / "job")
    assert ranges(events) == [(0, "Step", 0.01, 0.01)]
    assert merger.skipped["ranges without an end"] == 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.tuples(
                st.sampled_from([1, 2, 4, 3]),
                st.integers(-5, 2**64),
                st.integers(0, 4),
                st.text(max_size=5),
                st.sampled_from(["default", "communication", "z"]),
            ),
            st.recursive(
                st.none() | st.integers() | st.text(max_size=3),
                lambda inner: st.dictionaries(
                    st.sampled_from(
                        [
                            "Flag",
                            "Id",
                            "Timestamp",
                            "Name",
                            "Domain",
                            "Clock",
                            "Call",
                            "OffsetNs",
                            "Host",
                            "MsptiObjectId",
                            "Pt",
                        ]
                    ),
                    inner,
                    max_size=6,
                ),
            ),
        ),
        max_size=30,
    )
)
def test_any_bytes_make_a_valid_trace(tmp_path: pathlib.Path, content: list) -> None:
    path = write(tmp_path / "job", 0, 1)
    with path.open("wb") as file:
        for item in content:
            file.write(
                item
                if isinstance(item, bytes)
                else line(*item).encode()
                if isinstance(item, tuple)
                else json.dumps(item).encode() + b"\n"
            )
    merged(tmp_path / "job")


def test_what_the_recorder_writes_is_understood(tmp_path: pathlib.Path) -> None:
    encoder = Encoder(0)
    lines = [encoder.head("job", 0).decode()]
    at = 0
    for version in range(1, 4):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, None):
            at += 10
            lines += [encoder.mark(at, phase, version)]
    call = Call(0, 0xAB, 1, 8, 7, None, 100, 120, "ncclAllReduce")
    lines += [encoder.begin(call, {0xAB: "dp"}), encoder.end(call)]
    write(tmp_path / "job", 0, 1, *lines)
    events, merger = merged(tmp_path / "job")
    assert [name for _, name, _, _ in ranges(events)] == ["DataLoader", "FP"] + [
        "DataLoader",
        "FP",
        "Step",
    ] * 2 + ["ncclAllReduce"]
    assert (
        next(event for event in events if event.get("cat") == "communication")["args"][
            "Communicator"
        ]
        == "dp"
    )
    assert +merger.skipped == {"ranges without an end": 1}


def test_folders(tmp_path: pathlib.Path, capsys) -> None:
    assert trace.main([str(tmp_path)]) == 1
    assert "holds no profile" in capsys.readouterr().err
    write(tmp_path / "base" / "one", 0, 1, line(2, 1, 1), line(4, 2, 1))
    assert trace.write_trace(tmp_path / "base", tmp_path / "t.json").events == 1
    write(tmp_path / "base" / "two", 0, 1, line(2, 1, 1), line(4, 2, 1))
    assert trace.main([str(tmp_path / "base")]) == 1
    assert "holds 2 jobs, name one of them: one, two" in capsys.readouterr().err
    assert trace.main([str(tmp_path / "nowhere")]) == 1
    assert (
        trace.main([str(tmp_path / "base" / "one"), "-o", str(tmp_path / "missing" / "t.json")])
        == 1
    )


@pytest.mark.slow
def test_it_is_streamed(tmp_path: pathlib.Path) -> None:
    """Two files of 10 MB in a process that may use 5 MB more than an empty one."""
    block = "".join(
        line(2, 2 * number + 1, number) + line(4, 2 * number + 2, number)
        for number in range(25_000)
    )
    for seconds in range(2):
        write(tmp_path / "job", 0, seconds, block)
    assert sum(path.stat().st_size for path in (tmp_path / "job/0").iterdir()) > 20_000_000
    # Not getrusage(2): what it calls the peak includes that of the process that has started it.
    code = f"""
import pathlib
from taskd import trace
def peak_kb():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak_kb()
trace.main([{str(tmp_path / "job")!r}, "-o", {str(tmp_path / "trace.json")!r}])
print(peak_kb() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) * 1024 < 5_000_000, done.stdout
