"""Dataclass fields as plain msgpack values and back, with every type checked on the way in.

Owns the rules for values: which integers are allowed, how long a text may be, what is written as a
list instead of a map. Knows no message: it reads the annotations of any dataclass of messages.py or
core. Whatever is wrong with a value from outside is a `RemoteProtocolError` that names the field.
"""

import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from taskd.core.commands import Move
from taskd.core.marks import GroupMark, Mark
from taskd.errors import RemoteProtocolError

MAX_TEXT_BYTES = 4096  # a reason or an exception's message; nobody reads more of it in a log line
MAX_TRACEBACK_BYTES = 16 * 1024  # about 200 frames
_TRACEBACK_TAIL_BYTES = 12 * 1024 - 13  # 13: the mark; 4 KiB are kept of the beginning
# far above any job; keeps a forged world size from making the manager count to 2**63
MAX_RANK = 1 << 20
MAX_INTEGER = (1 << 63) - 1  # what a signed 64-bit reader of the protocol can hold
# of what a manager goes on to count from: its own numbers, which are larger, still fit MAX_INTEGER
MAX_CLAIM = (1 << 53) - 1
# three hundred years; sums and differences of such times stay exact enough to be compared
MAX_SECONDS = 1e10

# Bulk values: written as lists of their fields in order. 4,096 of them as maps would not fit into a
# message, and marks come each second.
_AS_LIST: frozenset[type] = frozenset({Move, Mark, GroupMark})
# fields that an older peer sends of those that have gained some; the others take their default
_BEGAN_WITH: dict[type, int] = {Move: 2}
_SMALL = frozenset(
    {
        "rank",
        "ranks",
        "node_rank",
        "local_rank",
        "world_size",
        "node_count",
        "source",
        "culprit",
        "buddy",
    }
)
_SIGNED = frozenset({"exit_code"})  # minus the signal number
_CLAIMS = frozenset(
    {
        "generation",
        "incarnation",
        "incarnations",
        "version",
        "restarts_used",
        "box_versions",
        "snapshots",
        "held",
    }
)

Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]


def cut_text(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """The beginning of `text` in at most `limit` bytes of UTF-8, with a mark where it is cut."""
    return _cut(text, limit, " ... (cut)", 0)


def cut_traceback(text: str) -> str:
    """Both ends of `text` in at most MAX_TRACEBACK_BYTES of UTF-8.

    The first line says what it is, the last ones hold the exception itself.
    """
    return _cut(text, MAX_TRACEBACK_BYTES, "\n  ... (cut)\n", _TRACEBACK_TAIL_BYTES)


def _cut(text: str, limit: int, mark: str, tail_bytes: int) -> str:
    if 4 * len(text) <= limit:
        return text
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    head, tail = data[: limit - len(mark) - tail_bytes], data[len(data) - tail_bytes :]
    return head.decode(errors="ignore") + mark + tail.decode(errors="ignore")


class Record:
    """How the dataclass `cls` travels.

    As a map by field name, or as a list if it is a bulk value.
    """

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls)
        is_order = getattr(cls, "is_order", False)
        self._cls = cls
        self._as_list = cls in _AS_LIST or getattr(cls, "travels_as_list", False)
        self._needed = _BEGAN_WITH.get(cls, len(fields(cls)))
        self._fields = [
            (item.name, *_converters(hints[item.name], item.name, is_order=is_order))
            for item in fields(cls)
        ]
        self._unpack_list = _list_unpacker(cls, hints, is_order=is_order) if self._as_list else None
        self._unpack_map = _unpacker(cls, hints, _values_of_map, is_order=is_order)
        self._optional = {item.name for item in fields(cls) if item.default is not MISSING}

    def pack(self, value: Any) -> dict[str, Any] | list[Any]:
        """`value`, an instance of the class, as plain data."""
        if self._as_list:
            return [pack(getattr(value, name)) for name, pack, _ in self._fields]
        return {name: pack(getattr(value, name)) for name, pack, _ in self._fields}

    def unpack(self, data: Any, where: str) -> Any:
        """An instance from plain data.

        Fields that we do not know are ignored; those of an older peer take their default.
        """
        if self._unpack_list is not None:
            if not isinstance(data, list) or len(data) < self._needed:
                raise wrong(where, f"a list of {self._needed}", data)
            return self._unpack_list(data, where)
        if not isinstance(data, dict):
            raise wrong(where, "a map", data)
        try:
            return self._unpack_map(data, where)
        except KeyError:
            return self._unpack_other(data, where)

    def _unpack_other(self, data: dict[Any, Any], where: str) -> Any:
        """An instance from a map without some of the fields."""
        values = {}
        for name, _, unpack in self._fields:
            if name in data:
                values[name] = unpack(data[name], f"{where}.{name}")
            elif name not in self._optional:
                raise RemoteProtocolError("malformed", f"{where}.{name} is missing")
        return self._cls(**values)


def _list_unpacker(cls: type, hints: dict[str, Any], *, is_order: bool) -> Unpack:
    """How a bulk value is read that has all its fields, or all but the last ones."""
    unpack_all = _unpacker(cls, hints, _values_of_list, is_order=is_order)
    names = [item.name for item in fields(cls)]
    unpacks = [_converters(hints[name], name, is_order=is_order)[1] for name in names]

    def unpack(data: list[Any], where: str) -> Any:
        if len(data) == len(unpacks):
            return unpack_all(data, where)
        # of an older peer, or of a newer one
        return cls(*[convert(item, where) for item, convert in zip(data, unpacks, strict=False)])

    return unpack


def _values_of_list(names: list[str]) -> list[str]:
    return [f"{', '.join(f'_{name}' for name in names)}, = data"]


def _values_of_map(names: list[str]) -> list[str]:
    return [f'_{name} = data["{name}"]' for name in names]


def _unpacker(
    cls: type,
    hints: dict[str, Any],
    values: Callable[[list[str]], list[str]],
    *,
    is_order: bool,
) -> Unpack:
    """How a value is read that has all its fields, which `values` takes from `data`.

    A manager of thousands of nodes spends most of its time here. So what is right as it is, as
    nearly all is, is seen in straight-line code, made here from the annotations: one look at each
    value, and a call for those only that are wrong or have to be converted.
    """
    names = [item.name for item in fields(cls)]
    body = values(names)
    for name in names:
        is_right = _is_right(hints[name], name, f"_{name}", is_order=is_order)
        converted = f"unpack_{name}(_{name}, f'{{where}}.{name}')"
        if get_origin(hints[name]) is tuple:
            converted = f"() if _{name} == [] else {converted}"
        body.append(f"if not ({is_right}): _{name} = {converted}")
    body.append(f"return cls({', '.join(f'_{name}' for name in names)})")
    scope: dict[str, Any] = {
        "cls": cls,
        **{
            f"unpack_{name}": _converters(hints[name], name, is_order=is_order)[1] for name in names
        },
    }
    return _made("unpack_all", body, scope)


def _is_right(hint: Any, name: str, value: str, *, is_order: bool) -> str:
    """The condition under which the variable `value` is what `_converters` would make of it."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        return f"{value} is None or {_is_right(inner, name, value, is_order=is_order)}"
    if hint is int:
        low, high = _range(name, is_order=is_order)
        return f"type({value}) is int and {low} <= {value} <= {high}"
    conditions = {
        bool: f"type({value}) is bool",
        float: f"type({value}) is float and 0.0 <= {value} <= {MAX_SECONDS!r}",
        str: f"type({value}) is str and len({value}) <= {_characters(name)}",
    }
    return conditions.get(hint, "False")


_RECORDS: dict[type, Record] = {}


def record(cls: type) -> Record:
    """The one `Record` of a class."""
    if cls not in _RECORDS:
        _RECORDS[cls] = Record(cls)
    return _RECORDS[cls]


def parse(data: bytes, limit: int) -> Any:
    """The plain data of a frame, which may have `limit` bytes. Raises `RemoteProtocolError`."""
    if len(data) > limit:
        raise RemoteProtocolError("size", f"{len(data)} bytes, allowed are {limit}")
    try:
        return msgpack.unpackb(data)
    # Everything that msgpack raises for bad input is a ValueError or one of its own.
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("malformed", f"no msgpack: {type(error).__name__}") from error


def check_version(value: Any, ours: int) -> None:
    """Raise `RemoteProtocolError` unless the peer speaks our version."""
    version = integer(value, "version")
    if version != ours:
        raise RemoteProtocolError("version", f"the peer speaks version {version}, we speak {ours}")


def wrong(where: str, expected: str, value: object) -> RemoteProtocolError:
    """The error for a value of the wrong type or size.

    The value itself comes from a stranger: only its type is shown.
    """
    return RemoteProtocolError(
        "malformed", f"{where} must be {expected}, not {type(value).__name__}"
    )


def integer(value: Any, where: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """The value, an integer of that range; a bool is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(where, "an integer", value)
    if not low <= value <= high:
        raise RemoteProtocolError("malformed", f"{where} must be between {low} and {high}")
    return value


def text(value: Any, where: str) -> str:
    """The value, a string."""
    if not isinstance(value, str):
        raise wrong(where, "a string", value)
    return value


def _bytes(value: Any, where: str) -> bytes:
    if not isinstance(value, bytes):
        raise wrong(where, "bytes", value)
    return value


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, "a boolean", value)
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is float and 0.0 <= value <= MAX_SECONDS:
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(where, "a number", value)
    if not math.isfinite(value):
        raise RemoteProtocolError("malformed", f"{where} must be finite")
    if not 0 <= value <= MAX_SECONDS:
        raise RemoteProtocolError(
            "malformed", f"{where} must be between 0 and {MAX_SECONDS:g} seconds"
        )
    return float(value)


def _same(value: Any) -> Any:
    return value


def _converters(hint: Any, name: str, *, is_order: bool) -> tuple[Pack, Unpack]:
    """How a value of this annotation becomes plain data, and how it is read and checked.

    `is_order`: it is the manager's, whose own counts may be larger than any claim.
    """
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        pack, unpack = _converters(inner, name, is_order=is_order)
        return (
            lambda value: None if value is None else pack(value),
            lambda value, where: None if value is None else unpack(value, where),
        )
    if get_origin(hint) is tuple:
        return _tuple_converters(get_args(hint), name, is_order=is_order)
    if is_dataclass(hint):
        return record(hint).pack, record(hint).unpack  # type: ignore[arg-type]
    if hint is str:
        return _text_converters(name)
    if issubclass(hint, Enum):
        return lambda value: hint(value).value, _enum_unpacker(hint)
    unpackers = {
        bool: _boolean,
        bytes: _bytes,
        float: _number,
        int: _integer_unpacker(name, is_order=is_order),
    }
    return _same, unpackers[hint]


def _text_converters(name: str) -> tuple[Pack, Unpack]:
    """What a peer did not cut is cut here."""
    cut = cut_traceback if name == "traceback" else cut_text
    fits = _characters(name)

    def unpack(value: Any, where: str) -> str:
        if type(value) is str and len(value) <= fits:
            return value
        return cut(text(value, where))

    return cut, unpack


def _characters(name: str) -> int:
    """A text of so many surely has not too many bytes."""
    return (MAX_TRACEBACK_BYTES if name == "traceback" else MAX_TEXT_BYTES) // 4


def _tuple_converters(parts: tuple[Any, ...], name: str, *, is_order: bool) -> tuple[Pack, Unpack]:
    if parts[-1] is Ellipsis:
        pack, unpack = _converters(parts[0], name, is_order=is_order)

        def unpack_all(value: Any, where: str) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise wrong(where, "a list", value)
            return tuple([unpack(item, where) for item in value])

        return lambda values: [pack(value) for value in values], unpack_all
    packs, unpacks = zip(
        *(_converters(part, name, is_order=is_order) for part in parts), strict=True
    )

    def unpack_other(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(unpacks):
            raise wrong(where, f"a list of {len(unpacks)}", value)
        return tuple([unpack(item, where) for unpack, item in zip(unpacks, value, strict=True)])

    return (
        lambda values: [pack(value) for pack, value in zip(packs, values, strict=True)],
        _each_unpacker(parts, name, unpack_other, is_order=is_order),
    )


def _each_unpacker(parts: tuple[Any, ...], name: str, other: Unpack, *, is_order: bool) -> Unpack:
    """`other` for what is not right as it is: see `_unpacker`."""
    values = [f"_{index}" for index in range(len(parts))]
    rights = [
        f"({_is_right(part, name, value, is_order=is_order)})"
        for part, value in zip(parts, values, strict=True)
    ]
    body = [
        f"if type(data) is list and len(data) == {len(parts)}:",
        f"    {', '.join(values)}, = data",
        f"    if {' and '.join(rights)}: return ({', '.join(values)},)",
        "return other(data, where)",
    ]
    return _made("unpack_each", body, {"other": other})


def _made(name: str, body: list[str], scope: dict[str, Any]) -> Unpack:
    """The function of these lines, which see `scope`."""
    exec("\n    ".join([f"def {name}(data, where):", *body]), scope)  # noqa: S102
    made: Unpack = scope[name]
    return made


def _integer_unpacker(name: str, *, is_order: bool) -> Unpack:
    low, high = _range(name, is_order=is_order)

    def unpack(value: Any, where: str) -> int:
        # most are right: a second call for each number of each mark would cost as much again
        if type(value) is int and low <= value <= high:
            return value
        return integer(value, where, low, high)

    return unpack


def _range(name: str, *, is_order: bool) -> tuple[int, int]:
    if name in _SIGNED:
        return -MAX_INTEGER, MAX_INTEGER
    if name in _SMALL:
        return 0, MAX_RANK
    return 0, MAX_CLAIM if name in _CLAIMS and not is_order else MAX_INTEGER


def _enum_unpacker(kind: type[Enum]) -> Unpack:
    by_value = {member.value: member for member in kind}

    def unpack(value: Any, where: str) -> Enum:
        member = by_value.get(text(value, where))
        if member is None:
            raise RemoteProtocolError("malformed", f"{where} is no {kind.__name__} that we know")
        return member

    return unpack
