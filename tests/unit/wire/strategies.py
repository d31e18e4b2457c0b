"""Random valid messages and envelopes, from the types' own annotations."""

from __future__ import annotations

import dataclasses
import types
import typing

from hypothesis import strategies as st

from taskd.core.faults import FaultKind
from taskd.core.worker_state import WorkerState
from taskd.wire import schema
from taskd.wire.codec import ROLES, Envelope
from taskd.wire.messages import MESSAGE_BY_CODE

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
COUNT = st.integers(0, schema.MAX_INTEGER)
CLAIM = st.integers(0, schema.MAX_CLAIM)
RANK = st.integers(0, schema.MAX_RANK)


def of_field(name: str, hint: typing.Any, *, is_order: bool = False) -> st.SearchStrategy:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return st.none() | of_field(name, inner, is_order=is_order)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is Ellipsis:
            return st.lists(of_field(name, parts[0], is_order=is_order), max_size=4).map(tuple)
        return st.tuples(*(of_field(name, part, is_order=is_order) for part in parts))
    if dataclasses.is_dataclass(hint):
        return of_class(hint)
    if hint is int and name in schema._SIGNED:
        return st.integers(-64, 255)
    number = (
        RANK
        if name in schema._SMALL
        else CLAIM
        if name in schema._CLAIMS and not is_order
        else COUNT
    )
    return {
        int: number,
        str: TEXT,
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        float: st.floats(0, schema.MAX_SECONDS),
        FaultKind: st.sampled_from(FaultKind),
        WorkerState: st.sampled_from(WorkerState),
    }[hint]


def of_class(cls: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    is_order = getattr(cls, "is_order", False)
    values = {
        field.name: of_field(field.name, hints[field.name], is_order=is_order)
        for field in dataclasses.fields(cls)
    }
    return st.builds(cls, **values)


MESSAGES = {cls: of_class(cls) for cls in MESSAGE_BY_CODE.values()}
ANY_MESSAGE = st.one_of(*MESSAGES.values())
ENVELOPES = st.builds(
    Envelope,
    job_id=TEXT,
    role=st.sampled_from(ROLES),
    node_rank=st.none() | RANK,
    rank=st.none() | RANK,
    incarnation=st.none() | TEXT | COUNT,
    generation=COUNT,
    sequence=COUNT,
    cause=TEXT,
)
