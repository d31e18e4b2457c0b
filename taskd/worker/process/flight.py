"""What torch's flight recorder knows of gloo's collectives, which C code cannot hook.

The counters (begun, complete) of all groups cost microseconds; the calls themselves (a ring of
2,000 by default) cost milliseconds, and are read only when somebody wants them. The recorder does
not keep when a gloo collective was complete: a call that is seen complete for the first time ended
at the latest then.
"""

import json
import logging
import pickle
import sys
import time
from dataclasses import dataclass
from math import prod
from typing import Any

from taskd.worker import internals

log = logging.getLogger(__name__)

_ITEM_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


@dataclass(frozen=True, slots=True)
class FlightCall:
    """One collective. `number`: within its group; 0: point to point.

    Times are monotonic nanoseconds.
    """

    record: int
    group: str
    name: str
    number: int
    bytes: int | None
    enter_ns: int
    is_complete: bool


def counters() -> dict[str, tuple[int, int]]:
    """Collectives begun and complete, by the number that a group has in this process.

    Empty if torch cannot tell.
    """
    dump = _function("_dump_fr_trace_json")
    try:
        return (
            {}
            if dump is None
            else {
                number: (
                    int(counts["last_enqueued_collective"]),
                    max(0, int(counts["last_completed_collective"])),
                )
                for number, counts in json.loads(dump(includeCollectives=False))[
                    "pg_status"
                ].items()
            }
        )
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError):
        log.debug("the counters of torch's flight recorder cannot be read", exc_info=True)
        return {}


def calls(after: int = -1) -> list[FlightCall]:
    """The calls that the ring holds with a record number above `after`, oldest first.

    Empty if torch cannot tell.
    """
    dump = _function("_dump_fr_trace")
    offset_ns = time.monotonic_ns() - time.time_ns()
    try:
        entries = (
            []
            if dump is None
            else pickle.loads(dump(includeCollectives=True, includeStackTraces=False))["entries"]  # noqa: S301
        )
        return [_call(entry, offset_ns) for entry in entries if entry["record_id"] > after]
    except (
        RuntimeError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        pickle.UnpicklingError,
    ):
        log.debug("the calls in torch's flight recorder cannot be read", exc_info=True)
        return []


def _function(name: str) -> Any:
    module = sys.modules.get("torch._C._distributed_c10d")
    if module is None or not internals.has("the flight recorder", (module, name)):
        return None
    return getattr(module, name)


def _call(entry: dict[str, Any], offset_ns: int) -> FlightCall:
    sizes = [
        prod(shape) * _ITEM_BYTES.get(dtype, 0)
        for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    ]
    return FlightCall(
        record=entry["record_id"],
        group=entry["process_group"][0],
        name=entry["profiling_name"],
        number=0 if entry["is_p2p"] else entry["collective_seq_id"],
        bytes=sum(sizes) if sizes and all(sizes) else None,
        enter_ns=entry["time_created_ns"] + offset_ns,
        is_complete=bool(entry["retired"]),
    )
