"""The names of the nodes of a Slurm allocation."""

import os
import re
from itertools import product

from taskd.config.values import Environment

_NODES_ENV = "SLURM_JOB_NODELIST"
# An elected manager is on one of the first nodes that are left. Each torchrun asks all of these
# when the job starts and no manager is there yet: a few milliseconds for each, a second for one
# that is down.
MAX_NODES = 32
_PART = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def nodes_of_allocation(environment: Environment = os.environ) -> list[str]:
    """Names of SLURM_JOB_NODELIST, as "n[1-3,07],login"; []: this is no job of Slurm.

    What is not understood is left out: a torchrun must not fail at a variable that it can do
    without.
    """
    found: list[str] = []
    for text in _split(environment.get(_NODES_ENV, "")):
        found += _expanded(text, MAX_NODES - len(found))
    return found


def _split(text: str) -> list[str]:
    """At the commas that are outside of brackets."""
    return [one for one in re.split(r",(?![^\[]*\])", text) if one]


def _expanded(text: str, limit: int) -> list[str]:
    parts = _PART.findall(text)
    if "".join(parts) != text:
        return []
    choices = [_numbers(part, limit) if part.startswith("[") else [part] for part in parts]
    return ["".join(chosen) for chosen, _ in zip(product(*choices), range(limit), strict=False)]


def _numbers(brackets: str, limit: int) -> list[str]:
    """Those of "[1-3,07]", with the zeros before them."""
    found: list[str] = []
    for text in brackets[1:-1].split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            return []
        first, last = match[1], match[2] or match[1]
        numbers = range(int(first), min(int(last) + 1, int(first) + limit))
        found += [str(number).zfill(len(first)) for number in numbers]
    return found
