"""The parameters of cells as one run of bytes: where each lies in it, copied out and put back.

On the CPU `Parameter.asnumpy()` is a view of the memory that training writes, and costs 15 µs of
Python; `data_ptr()` costs 1, and returns when what was begun on the parameter is done, as
`asnumpy()` does. So views are made once, and used for as long as every parameter stays where it
was. On a device each copy goes through `asnumpy()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from taskd.checkpoint.flat import Layout
from taskd.errors import StateError
from taskd.mindspore.internals import generator, has_live_views

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# MindSpore's name of a type to that of safetensors.
_TYPES = {
    "Float64": "F64", "Float32": "F32", "Float16": "F16", "BFloat16": "BF16",
    "Int64": "I64", "Int32": "I32", "Int16": "I16", "Int8": "I8",
    "UInt64": "U64", "UInt32": "U32", "UInt16": "U16", "UInt8": "U8", "Bool": "BOOL",
}  # fmt: skip

_BUILD_FIRST = "Where a graph divides parameters, call model.build(...) before restore()"


class Content:
    """Those of these cells, each once, in the order in which they are found."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        """Raises StateError: two parameters have one name, or a type that cannot be carried."""
        self._by_name = {**_collect(cells), **generator()}
        layout, end = [], 0
        for name, parameter in self._by_name.items():
            dtype = _dtype(name, parameter)
            start, end = end, end + _size(parameter)
            layout.append(Layout(name, dtype, tuple(parameter.shape), start, end))
        self.layout = tuple(layout)
        self.size_bytes = end
        self._places: list[int] = []
        self._asked: list[Any] = []  # bound once: a step empties the caches
        self._views: list[np.ndarray] = []
        self._is_live = has_live_views()

    @property
    def names(self) -> set[str]:
        """Of all of them."""
        return set(self._by_name)

    def copy_into(self, target: memoryview) -> None:
        """All bytes, one behind the other. Returns when what was computed before is in it.

        Raises StateError: a parameter has another shape than when this was made.
        """
        if self._is_live:
            places = [data_ptr() for data_ptr in self._asked]
            if places != self._places or not places:
                self._views = self._make_views()
                self._asked = [parameter.data_ptr for parameter in self._by_name.values()]
                self._places = [data_ptr() for data_ptr in self._asked]
            views = self._views
        else:
            views = self._make_views()
        if views:
            np.concatenate(views, out=np.frombuffer(target, np.uint8))

    def pieces(self) -> Iterator[memoryview]:
        """The same bytes without room for all of them: those of one parameter after another."""
        for one, parameter in zip(self.layout, self._by_name.values(), strict=True):
            yield _bytes_of(one, parameter).data

    def load(self, layout: Iterable[Layout], data: memoryview) -> None:
        """Put these bytes into the parameters.

        Raises:
            StateError: they are of other parameters; nothing was changed.
        """
        found = {one.name: one for one in layout}
        expected = {one.name: one for one in self.layout}
        _check_same(found, expected)
        for name, parameter in self._by_name.items():
            one = found[name]
            content = np.frombuffer(data[one.start : one.end], dtype=parameter.asnumpy().dtype)
            content = content.reshape(one.shape).copy()  # MindSpore may keep the memory
            parameter.set_data(mindspore.Tensor(content, dtype=parameter.dtype))
        self._places = []

    def _make_views(self) -> list[np.ndarray]:
        return list(map(_bytes_of, self.layout, self._by_name.values()))


def _bytes_of(one: Layout, parameter: Any) -> np.ndarray:
    found: np.ndarray = parameter.asnumpy()
    if found.shape != one.shape:
        raise StateError(
            f"TrainState.commit(): {one.name} is {list(found.shape)}, and was {list(one.shape)} in "
            f"restore(). {_BUILD_FIRST}"
        )
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


def _collect(cells: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role, cell in cells.items():
        if not hasattr(cell, "get_parameters"):
            raise StateError(
                f"TrainState: {role}={cell!r} is not accepted: expected a Cell, like a network or "
                "an optimizer"
            )
        for parameter in cell.get_parameters():
            known = found.setdefault(parameter.name, parameter)
            if known is not parameter:
                raise StateError(
                    f"TrainState: two parameters are called {parameter.name!r}: give the cells "
                    "names of their own (Cell.update_parameters_name)"
                )
    return found


def _dtype(name: str, parameter: Any) -> str:
    if str(parameter.dtype) not in _TYPES:
        raise StateError(
            f"TrainState: parameter {name!r} is of type {parameter.dtype}, which cannot be saved; "
            f"known are {', '.join(_TYPES)}"
        )
    return _TYPES[str(parameter.dtype)]


def _size(parameter: Any) -> int:
    return int(parameter.asnumpy().nbytes)


def _check_same(found: Mapping[str, Layout], expected: Mapping[str, Layout]) -> None:
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or more:
        raise StateError(
            "the saved state is of another network: "
            + "; ".join(
                f"{len(names)} {what} ({', '.join(names[:4])}{' ...' if len(names) > 4 else ''})"
                for names, what in ((missing, "are not in it"), (more, "are in it and not here"))
                if names
            )
        )
    for name, one in expected.items():
        other = found[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise StateError(
                f"the saved state is of another network: {name} is {other.dtype} "
                f"{list(other.shape)} in it and {one.dtype} {list(one.shape)} here. {_BUILD_FIRST}"
            )
