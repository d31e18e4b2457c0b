"""What the benchmarks conclude from what they see; and whose code they use."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import pathlib

from benchmarks import chaos_hosts, chaos_hosts_job, recovery, soak, soak_plan
from benchmarks.measuring import percentile
from testbed.facts import facts_in

ROOT = pathlib.Path(__file__).resolve().parents[2]


def imported_by(folder: str) -> set[str]:
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def test_neither_benchmarks_nor_the_testbed_import_tests() -> None:
    assert "testbed" in imported_by("benchmarks")
    assert "tests" not in imported_by("benchmarks")
    assert not {"tests", "benchmarks", "pytest"} & imported_by("testbed")


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7


def test_without_the_comparison_no_ratio_to_it_is_told() -> None:
    rows = [{"p50_s": 0.25}, {"p50_s": 0.5}, {"p50_s": 5.0}]
    assert recovery.ratios_of(rows[:1], {}) == {}
    assert recovery.ratios_of(rows[:1], {"taskd": 2.0, "torchrun": 3.0}) == {
        "start_up_vs_torchrun": 1.5
    }
    assert recovery.ratios_of(rows, {}) == {
        "recoverable_vs_torchrun": 20.0,
        "unmodified_vs_torchrun": 10.0,
    }


def test_a_process_own_memory_is_told_apart_from_that_of_files() -> None:
    size = soak_plan.size_of(os.getpid())
    assert set(size) == {*soak_plan.MEMORY, "own_kb", "held_kb", "fds", "threads"}
    assert size["own_kb"] == size["anon_kb"] + size["shmem_kb"] > 0
    assert size["file_kb"] > 0


def samples(**slopes: int) -> list[soak.Sample]:
    keys = (*soak_plan.MEMORY, "own_kb", "held_kb", "fds", "threads")
    return [
        (number, {key: 1000 + number * slopes.get(key, 0) for key in keys}) for number in range(400)
    ]


def test_what_malloc_keeps_and_nobody_uses_is_told_apart() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(1000) for _ in range(50_000)]
    for block in blocks[:-1]:  # the last one keeps the heap from being trimmed
        libc.free(block)
    free_kb = soak_plan.free_kb()
    libc.free(blocks[-1])
    assert free_kb > 40_000
    size = soak_plan.size_of(os.getpid(), free_kb)
    assert size["held_kb"] == size["own_kb"] - free_kb


def test_growth_of_memory_in_use_and_of_descriptors_is_judged_and_other_memory_is_not() -> None:
    for key in ("held_kb", "fds", "threads"):
        growth = soak.growth_of(samples(**{key: 100}), memory_settled=100)
        (problem,) = growth["problems"]
        assert problem.startswith(f"{key} grew from ")
        assert growth[key]["per_1000"] == 100_000
    for key in ("file_kb", "own_kb"):
        growth = soak.growth_of(samples(**{key: 100}), memory_settled=100)
        assert growth["problems"] == []
        assert growth[key]["per_1000"] == 100_000


def test_descriptors_of_what_is_under_way_are_no_growth() -> None:
    found = samples()
    for number, size in found:
        size["fds"] += number % 60 + (number >= 300)  # at rest once in 60 samples
    (problem,) = soak.growth_of(found, memory_settled=100)["problems"]
    assert problem.startswith("fds grew from 1000 to 1001")
    for _, size in found[300:]:
        size["fds"] -= 1
    assert soak.growth_of(found, memory_settled=100)["problems"] == []


def test_a_line_that_a_kill_has_cut_off_is_left_out(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"what": what, "time": time}) for what, time in (("b", 2), ("cut", 3))]
    (tmp_path / "3-100.jsonl").write_text(f"{lines[0]}\n{lines[1][:9]}")
    (tmp_path / "0-101.jsonl").write_text(json.dumps({"what": "a", "time": 1}) + "\n")
    assert [(fact["what"], fact["rank"]) for fact in facts_in(tmp_path)] == [("a", 0), ("b", 3)]


def chaos_fault(kind: str, total_s: float | None, way: str | None, **more) -> dict:
    return {
        "kind": kind, "total_s": total_s, "recovered_by": way, "has_happened": True, "choice": 0,
        "found_as": [], "steps_redone": 0, "trouble": "", **more,
    }  # fmt: skip


def test_what_chaos_on_hosts_has_shown_is_counted_by_kind() -> None:
    faults = [
        chaos_fault("kill", 0.2, "recover-in-place"),
        chaos_fault("kill", 0.4, "recover-in-place", steps_redone=1),
        chaos_fault("node", 6.2, "recover"),
        chaos_fault("link", 6.5, "recover", found_as=["node lost"]),
        chaos_fault("stop", None, None, trouble="was not recovered"),
    ]
    verdict = {"faults": faults, "others": [], "problems": ["was not recovered"]}
    state = {(rank, 50): {"a"} for rank in range(4)}
    chaos_hosts.compare(verdict, state, state)
    found = chaos_hosts.summary([verdict])
    assert found["injected"] == {"kill": 2, "node": 1, "link": 1, "stop": 1}
    assert found["recovered_by"]["stop"] == {"not recovered": 1}
    assert found["times"]["kill"] == {"n": 2, "p50_s": 0.2, "p95_s": 0.4, "p99_s": 0.4,
                                      "max_s": 0.4}  # fmt: skip
    assert (found["steps_redone"], found["not_recovered"], found["states_compared"]) == (1, 1, 4)
    assert found["jobs_with_equal_digests"] == 1
    # 4 at the start, 2 kills, 2 of the node, 2 of the link that cost a node, 1 that was stopped
    assert chaos_hosts.expected_processes(verdict) == 4 + 2 + 2 + 2 + 1
    assert chaos_hosts.table(found)[-1] == "was not recovered"


def test_other_states_and_a_rank_without_any_are_no_equal_digests() -> None:
    expected = {(rank, 50): {"a"} for rank in range(4)}
    for found in (expected | {(1, 50): {"b"}}, expected | {(1, 50): {"a", "b"}}, {(0, 50): {"a"}}):
        verdict: dict = {"problems": []}
        chaos_hosts.compare(verdict, found, expected)
        assert verdict["digest_equal"] == "no"
        assert len(verdict["problems"]) == 1


def test_every_fault_of_a_link_is_drawn() -> None:
    drawn = {chaos_hosts_job.what_befalls(choice) for choice in range(0, 10**6, 99991)}
    assert len(drawn) == 8
