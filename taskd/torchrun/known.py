"""Tells whether the torch that is installed is one that taskd knows.

What decides is what the seams look like, not the version number. Imports torch, changes nothing.
"""

import hashlib
import importlib
import inspect
import linecache
import logging
from dataclasses import dataclass
from typing import Any

import torch

from taskd.errors import UnsupportedTorchError
from taskd.torchrun.seams import KNOWN_TORCH, SEAMS, TESTED_TORCH, Seam

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What one seam looks like here.

    `parameters` is None if it is not there, for the reason `missing`. `source` is the hash, "" if
    there is no source: an installation may have compiled files alone.
    """

    parameters: tuple[str, ...] | None
    source: str = ""
    missing: str = ""


def check(version: str) -> None:
    """Warn where this torch is not one that jobs were tested on, though its seams are known.

    Raises UnsupportedTorchError if it looks like none: with what differs from the nearest.
    """
    works = f"taskd works with torch {', '.join(KNOWN_TORCH)}"
    if not torch.distributed.is_available():
        raise UnsupportedTorchError(f"torch {version} is built without torch.distributed. {works}")
    found = [_look(seam) for seam in SEAMS]
    own = version.partition("+")[0]
    newest_first = sorted(KNOWN_TORCH, key=lambda tested: (tested == own, _number(tested)))[::-1]
    differences = {tested: _differences(found, tested) for tested in newest_first}
    nearest = min(newest_first, key=lambda tested: len(differences[tested]))
    if differences[nearest]:
        raise UnsupportedTorchError(
            f"torch {version} differs from torch {nearest}: "
            f"{'; '.join(differences[nearest])}. {works}"
        )
    unseen = any(seam.sources and not here.source for seam, here in zip(SEAMS, found, strict=True))
    if nearest != own or own not in TESTED_TORCH or unseen:
        log.warning(
            "torch %s is not one that taskd is tested with (%s). Going on: what taskd relies on "
            "looks as in torch %s%s",
            version,
            ", ".join(TESTED_TORCH),
            nearest,
            ", by names of parameters alone: it is installed without sources" if unseen else "",
        )


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _look(seam: Seam) -> Found:
    try:
        target: Any = importlib.import_module(seam.module)
        for part in seam.attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return Found(None, missing=str(error))
    parameters = tuple(inspect.signature(target).parameters)
    if not seam.sources:
        return Found(parameters)
    return Found(parameters, source_hash(inspect.unwrap(target)))


def source_hash(function: Any) -> str:
    """The first digits of the SHA-256 of a function's source; "": there is none.

    `inspect.getsource` would read it token by token to find its end, which takes 1 ms for each.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)
    if not lines:
        return ""
    first = code.co_firstlineno - 1
    indent = _indent(lines[first])
    head = next(n for n in range(first, len(lines)) if lines[n].lstrip().startswith("def "))
    end = next(
        (
            n
            for n in range(head + 1, len(lines))
            if lines[n].strip()
            and _indent(lines[n]) <= indent
            and not lines[n].lstrip().startswith(")")
        ),
        len(lines),
    )
    return hashlib.sha256("".join(lines[first:end]).rstrip().encode()).hexdigest()[:12]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _differences(found: list[Found], tested: str) -> list[str]:
    told = []
    for seam, here in zip(SEAMS, found, strict=True):
        known = seam.parameters(tested)
        if here.parameters is None:
            told.append(f"{seam.name} is not there ({here.missing})")
        elif here.parameters != known:
            told.append(
                f"{seam.name} takes ({', '.join(here.parameters)}), known is ({', '.join(known)})"
            )
        elif here.source and here.source != seam.source(tested):
            told.append(f"the source of {seam.name} has changed")
    return told
