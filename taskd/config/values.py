"""Single settings, out of a config dict or the environment, checked.

Every error is a `ConfigError` that says what is accepted.
"""

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from taskd.config.names import OF_TASKD
from taskd.errors import ConfigError

Environment = Mapping[str, str]
Settings = Mapping[str, object]
MAX_SECONDS = 86400.0  # a day: whoever waits longer for a stuck rank has mistyped

# Above it names differ in a letter or two: checkpoint_evry. Below it are names that somebody means:
# checkpoint_step is like checkpoint_keep by 0.87.
_NEARLY = 0.9

T = TypeVar("T")


def refusal(key: str, value: object, accepted: str) -> ConfigError:
    """The error that names the key, the value and what is accepted."""
    return ConfigError(f"{key}={value!r} is not accepted: expected {accepted}")


def checked(config: object) -> Settings:
    """The dict itself; {} for None. Raises ConfigError."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise refusal("config", config, "a dict with strings as keys")
    return config


def unknown(config: Settings | None, known: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each key that nobody reads, with the known one that is most like it, or ""."""
    folded = {name.lower(): name for name in known}
    near = {key: difflib.get_close_matches(key.lower(), folded, 1) for key in config or {}}
    return [
        (key, folded[found[0]] if found else "") for key, found in near.items() if key not in known
    ]


def misspelt(given: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """Each name that is nearly a known one, with that one. What is another name is left out."""
    near = ((name, difflib.get_close_matches(name, known, 1, _NEARLY)) for name in given)
    return [(name, found[0]) for name, found in near if found and name not in known]


def misspelt_variables(environment: Environment = os.environ) -> list[tuple[str, str]]:
    """The same of the variables that begin like ours."""
    return misspelt((name for name in environment if name.startswith("TASKD_")), OF_TASKD)


def typed(config: Settings, key: str, kind: type[T], accepted: str) -> T | None:
    """The value if it is there and of this kind; None if it is not there."""
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise refusal(key, value, accepted)
    return value


def natural(key: str, value: object) -> int:
    """0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise refusal(key, value, "an integer, 0 or more")
    return value


def count(config: Settings, key: str) -> int | None:
    """1 or more, or None if it is not there."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(key, value, "a positive integer")
    return value


def utf8(key: str, value: str) -> str:
    """What other processes are told: it travels as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refusal(key, value, "text in UTF-8; \\udcXX is a byte XX that is none") from None
    return value


def digits(environment: Environment, key: str) -> int:
    """A number that must be there."""
    value = environment.get(key)
    if value is None or not (value.isascii() and value.isdigit()):
        raise refusal(key, value, "an integer, 0 or more, in the environment")
    return int(value)


def choice(environment: Environment, key: str, accepted: tuple[str, ...], default: str) -> str:
    """One of a few words."""
    value = environment.get(key) or default
    if value not in accepted:
        raise refusal(key, value, " or ".join(accepted))
    return value


def switch(environment: Environment, key: str, *, default: bool) -> bool:
    """Whether "on", rather than "off", is said."""
    return choice(environment, key, ("on", "off"), "on" if default else "off") == "on"


def listed(text: str | None) -> tuple[str, ...]:
    """Names that are separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def seconds(environment: Environment, key: str, default: float) -> float:
    """A duration, at most a day."""
    value = environment.get(key)
    if not value:
        return default
    accepted = f"seconds, more than 0 and at most {MAX_SECONDS:.0f}"
    try:
        found = float(value)
    except ValueError:
        raise refusal(key, value, accepted) from None
    if not 0 < found <= MAX_SECONDS:
        raise refusal(key, value, accepted)
    return found
