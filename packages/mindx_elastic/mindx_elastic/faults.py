"""The list of faulty chips that the platform mounts: `fault-npus` of the ConfigMap fault-config-*.

Its content is `{"FaultRankIds": ["0", "3"], ...}`, `{"status": "initializing"}` before the first
fault. Some versions write the list as text within the text.
"""

from __future__ import annotations

import ast
import json
import os
from typing import Any

from mindx_elastic import files
from mindx_elastic.errors import DamagedFileError
from mindx_elastic.record import MAX_RANK

PATH = "/user/restore/fault/config/fault-npus"
PATH_ENV = "MINDX_FAULT_NPUS"
MAX_BYTES = 1 << 20
_KEY = "FaultRankIds"


def path() -> str:
    """Where the list is mounted."""
    return os.environ.get(PATH_ENV) or PATH


def read() -> tuple[int, ...] | None:
    """Ranks with a faulty chip; None: nothing is mounted. Raises DamagedFileError."""
    where = path()
    if not os.path.lexists(where):
        return None
    data = files.read(where, MAX_BYTES)
    try:
        return decode(data)
    except DamagedFileError as error:
        raise DamagedFileError(f"{where}: {error}") from error


def decode(data: bytes) -> tuple[int, ...]:
    """Raises DamagedFileError, whose text is the reason alone."""
    if not data.strip():
        return ()
    document = _value(data)
    if not isinstance(document, dict):
        raise DamagedFileError("is no JSON object")
    found = document.get(_KEY, [])
    if isinstance(found, str):
        found = _value(found.encode()) if found.strip() else []
    if not isinstance(found, (list, tuple)):
        raise DamagedFileError(f"{_KEY} is no list: {str(found)[:100]}")
    return tuple(sorted({_rank(one) for one in found}))


def _value(data: bytes) -> Any:
    try:
        text = data.decode()
        try:
            return json.loads(text)
        except ValueError:
            return ast.literal_eval(text)  # with single quotes, as Python prints it
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DamagedFileError(f"is neither JSON nor a Python literal: {error}") from error


def _rank(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_RANK:
        raise DamagedFileError(f"{_KEY} has {str(value)[:100]!r}, which is no rank")
    return value
