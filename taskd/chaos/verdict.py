"""What the runs have shown, as figures, a table and one word.

Two shares are computed for a mean time between failures of M seconds, from what was measured:

- ETTR (effective training time ratio), M / (M + t): the share of time in which steps are made;
  t is the mean of `total_s`, from a death to the first new commit of the slowest rank
- goodput, M / (M + t + r * s): the share of time in which steps are made that count; r is the mean
  number of steps redone after a fault, s the time of an undisturbed step

Faults of the manager cost no training time and are left out of both, as are those of links that
needed no recovery.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from taskd.chaos.run import Injected, Outcome

PARTS = ("detect", "decide", "quiesce", "respawn", "groups", "state", "first_step", "total")
MTBF_S = {"10 min": 600, "1 h": 3600, "3 h": 10800}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Some percentiles; empty: nothing was measured."""
    if not values:
        return {}
    found = {f"p{percent}": percentile(values, percent / 100) for percent in (50, 95, 99)}
    return {name: round(value, 4) for name, value in {**found, "max": max(values)}.items()}


def shares(lost: Sequence[tuple[float, int]], step_s: float | None) -> dict[str, dict[str, float]]:
    """ETTR and goodput by mean time between failures; of each fault its seconds and steps redone.

    Without a measured step goodput is there only if no step was redone.
    """
    if not lost:
        return {}
    t = statistics.fmean(total for total, _ in lost)
    r = statistics.fmean(redone for _, redone in lost)
    found: dict[str, dict[str, float]] = {}
    for name, m in MTBF_S.items():
        found[name] = {"ettr": round(m / (m + t), 6)}
        if step_s is not None or r == 0:
            found[name]["goodput"] = round(m / (m + t + r * (step_s or 0.0)), 6)
    return found


def digest_of(output: str, pattern: re.Pattern[str]) -> list[str]:
    """What the pattern finds in the output, sorted: processes print in any order."""
    return sorted(match[0] for match in pattern.finditer(output))


def compare(reference: str, output: str, pattern: re.Pattern[str]) -> tuple[str, str]:
    """Whether they are equal, "yes" or "no", and why not."""
    expected, found = digest_of(reference, pattern), digest_of(output, pattern)
    if not expected:
        return "no", f"--digest {pattern.pattern!r} matches nothing of what the reference prints"
    if expected == found:
        return "yes", ""
    missing, more = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    return "no", (
        f"the digests differ: only without faults {sorted(missing.elements())}, only with faults "
        f"{sorted(more.elements())}. If lines of two processes are mixed in it, have each written "
        "with its end in one call"
    )


def _causes(record: Mapping[str, object]) -> list[dict[str, Any]]:
    found: Any = record.get("faults", [])
    return list(found)


def _fault(injected: Injected) -> dict[str, Any]:
    """One row of the list of faults."""
    planned, record = injected.planned, injected.records[-1] if injected.records else {}
    causes = _causes(record)
    return {
        "number": planned.number,
        "kind": planned.kind,
        "position": injected.position,
        "ranks": [cause["rank"] for cause in causes],
        "found_as": [cause["kind"] for cause in causes],
        "choice": planned.choice,
        "pid": injected.pid,
        "at_s": round(injected.at_s, 3),
        "has_happened": injected.has_happened,
        "recovered_by": None if injected.trouble else injected.strategy,
        "total_s": record.get("total_s", None if injected.is_unrecorded else injected.took_s),
        "steps_redone": _redone(injected),
        "trouble": injected.trouble,
    }


def _took(injected: Sequence[Injected], *, is_ridden_through: bool) -> list[float]:
    """Seconds until the manager was back, or, of links, until every rank had committed again."""
    return [
        each.took_s
        for each in injected
        if each.took_s is not None and each.is_ridden_through is is_ridden_through
    ]


def _redone(injected: Injected) -> int:
    return sum(int(str(record["steps_redone"])) for record in injected.records)


def judge(
    outcome: Outcome, planned: int, *, digest: str = "not asked", digest_trouble: str = ""
) -> dict[str, Any]:
    """The whole as plain data; `passed` says whether there is no `problems`."""
    injected = outcome.injected
    recovered = [each for each in injected if not each.trouble]
    of_ranks = [each for each in recovered if each.records]
    last = [each.records[-1] for each in of_ranks]
    problems = [each.trouble for each in injected if each.trouble]
    if outcome.trouble and outcome.trouble not in problems:
        problems.append(outcome.trouble)
    if outcome.status != 0 and not problems:
        problems.append(f"the command ended with {outcome.status}")
    problems += [digest_trouble] if digest_trouble else []
    totals = [(float(str(each["total_s"])), _redone(own))
              for each, own in zip(last, of_ranks, strict=True)]  # fmt: skip
    return {
        "passed": not problems,
        "problems": problems,
        "planned": planned,
        "injected": dict(Counter(each.planned.kind for each in injected if each.has_happened)),
        "recovered": dict(Counter(each.strategy for each in recovered)),
        "not_recovered": [each.planned.number for each in injected if each.trouble],
        "parts_s": {
            part: spread([float(str(record[f"{part}_s"])) for record in last]) for part in PARTS
        },
        "total_s_by_kind": {
            kind: spread([float(str(each.records[-1]["total_s"])) for each in of_ranks
                          if each.planned.kind == kind])
            for kind in sorted({each.planned.kind for each in of_ranks})
        },
        "manager_back_s": spread(_took(recovered, is_ridden_through=False)),
        "ridden_through_s": spread(_took(recovered, is_ridden_through=True)),
        "steps_redone": sum(_redone(each) for each in injected),
        "step_s": None if outcome.step_s is None else round(outcome.step_s, 5),
        "shares_by_mtbf": shares(totals, outcome.step_s),
        "other_recoveries": len(outcome.others),
        "others": [
            {
                "recovered_by": record["strategy"],
                "ranks": [cause["rank"] for cause in _causes(record)],
                "found_as": [cause["kind"] for cause in _causes(record)],
                "steps_redone": record["steps_redone"],
            }
            for record in outcome.others
        ],
        "exit_code": outcome.status,
        "duration_s": round(outcome.duration_s, 1),
        "digest_equal": digest,
        "faults": [_fault(each) for each in injected],
    }  # fmt: skip


def table(result: dict[str, Any]) -> list[str]:
    """Lines for people."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(result["injected"].items()))
    ways = ", ".join(f"{name} {count}" for name, count in sorted(result["recovered"].items()))
    lines = [
        f"faults injected     {sum(result['injected'].values())} of {result['planned']}: {kinds}",
        f"recovered           {sum(result['recovered'].values())}: {ways}",
        f"not recovered       {len(result['not_recovered'])}",
        f"steps redone        {result['steps_redone']}",
        f"other recoveries    {result['other_recoveries']}",
        f"command ended with  {result['exit_code']}, after {result['duration_s']} s",
        f"digests equal       {result['digest_equal']}",
        "",
        f"{'seconds':18}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}",
    ]
    rows = {part.replace("_", " "): figures for part, figures in result["parts_s"].items()}
    rows |= {f"total, {kind}": figures for kind, figures in result["total_s_by_kind"].items()}
    rows["manager back"] = result["manager_back_s"]
    rows["nothing was needed"] = result["ridden_through_s"]
    lines += [
        f"{name:18}" + "".join(f"{value:9.3f}" for value in figures.values())
        for name, figures in rows.items()
        if figures
    ]
    if result["shares_by_mtbf"]:
        lines += ["", f"{'at an MTBF of':18}{'ETTR':>10}{'goodput':>10}"]
    lines += [
        f"{name:18}{share['ettr']:10.4%}"
        + (f"{share['goodput']:10.4%}" if "goodput" in share else f"{'-':>10}")
        for name, share in result["shares_by_mtbf"].items()
    ]
    word = "passed" if result["passed"] else "failed: " + "; ".join(result["problems"])
    return [*lines, "", f"verdict: {word}"]
