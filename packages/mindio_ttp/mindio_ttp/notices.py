"""What is said once in a process, however often it is asked for."""

import logging

log = logging.getLogger(__name__)

_said: set[str] = set()


def warn_once(name: str, why: str) -> None:
    """Say under WARNING why `name` does less than its users may expect."""
    if name not in _said:
        _said.add(name)
        log.warning("%s: %s", name, why)


def forget() -> None:
    """Nothing has been said yet."""
    _said.clear()
