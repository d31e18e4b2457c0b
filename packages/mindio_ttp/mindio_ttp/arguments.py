"""Checks of what a script hands in: what is out of its documented range raises, and says so."""

from collections.abc import Callable

MAX_WORLD = 100_000
MAX_STEP = 2**63 - 1


def whole_number(name: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int from `low` up to and including `high`.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        message = f"{name} must be a whole number from {low} to {high}, not {value!r}"
        raise ValueError(message)
    return int(value)


def address(name: str, value: object) -> str:
    """`value` if it can be an address or a host name; 0.0.0.0 and the like name nobody.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(value, str) or not value or not value.strip("0.:"):
        message = f"{name} must be an address or a host name other than 0.0.0.0, not {value!r}"
        raise ValueError(message)
    return value


def function(name: str, value: object) -> Callable[..., object]:
    """`value` if it can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        message = f"{name} takes a function, not {value!r}"
        raise TypeError(message)
    return value
