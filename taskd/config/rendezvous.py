"""taskd's settings in torchrun's `--rdzv-conf`, as `--rdzv-backend=taskd` takes them.

`fault_timeout=10` is TASKD_FAULT_TIMEOUT: it becomes that variable, for this process and all that
it starts, where whoever reads it checks it. What is given on the command line wins.
"""

import os
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import Any

from taskd.config import names
from taskd.config.names import PRELOAD_ENV, PROCESS_ENABLE_ENV, STRATEGY_ENV

# What torch's own rendezvous reads (static and c10d): these keep their meaning.
_OF_TORCH = (
    "cas_backoff_max_seconds", "close_timeout", "heartbeat_timeout", "is_host", "join_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "last_call_timeout", "rank", "read_timeout",
    "store_type", "timeout",
)  # fmt: skip
_VARIABLES = {
    key: name
    for name in vars(names).values()
    if isinstance(name, str) and name.startswith("TASKD_") and name != PROCESS_ENABLE_ENV
    if (key := name.removeprefix("TASKD_").lower()) not in _OF_TORCH
}
_LISTS = (PRELOAD_ENV, STRATEGY_ENV)  # commas separate settings: here "+" separates names


def take_settings(
    given: Mapping[str, Any], environment: MutableMapping[str, str] = os.environ
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Write taskd's own into the environment.

    Returns the rest, which is torch's, and the keys in it that nobody knows, each with the known
    one that is most like it ("": none is).
    """
    rest, unknown = {}, []
    for key, value in given.items():
        if key in _VARIABLES:
            name = _VARIABLES[key]
            environment[name] = str(value).replace("+", ",") if name in _LISTS else str(value)
            continue
        rest[key] = value
        if key not in _OF_TORCH:
            like = get_close_matches(key, [*_VARIABLES, *_OF_TORCH], 1)
            unknown.append((key, like[0] if like else ""))
    return rest, unknown
