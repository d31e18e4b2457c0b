"""The list of faulty chips, in each form in which platforms write it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic import faults
from mindx_elastic.errors import DamagedFileError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"FaultRankIds":["3","0"],"CreatTime":1700000000}', (0, 3)),
        ("{'FaultRankIds': ['1', '1']}", (1,)),
        ("{\"FaultRankIds\":\"['2', '5']\"}", (2, 5)),
        ('{"FaultRankIds":[4]}', (4,)),
        ('{"FaultRankIds":[]}', ()),
        ('{"FaultRankIds":""}', ()),
        ('{\n    "status":"initializing"\n}\n', ()),
        ("", ()),
        (" \n", ()),
    ],
)
def test_each_form_is_read(text, expected) -> None:
    assert faults.decode(text.encode()) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "no JSON object"),
        ('{"FaultRankIds":["x"]}', "is no rank"),
        ('{"FaultRankIds":[-1]}', "is no rank"),
        ('{"FaultRankIds":[true]}', "is no rank"),
        ('{"FaultRankIds":["70000"]}', "is no rank"),
        ('{"FaultRankIds":3}', "is no list"),
        ('{"FaultRankIds":["1"', "neither JSON"),
        ("__import__('os')", "neither JSON"),
        ("\xff\xfe", "neither JSON|no JSON"),
    ],
)
def test_what_is_wrong_is_said(text, reason) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        faults.decode(text.encode("latin-1"))


@given(st.binary(max_size=80))
def test_any_bytes_are_ranks_or_refused(data) -> None:
    with contextlib.suppress(DamagedFileError):
        assert all(type(rank) is int for rank in faults.decode(data))


def test_the_place_can_be_chosen_and_nothing_mounted_is_nothing_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINDX_FAULT_NPUS", str(tmp_path / "fault-npus"))
    assert faults.read() is None
    (tmp_path / "fault-npus").write_text('{"FaultRankIds":["7"]}')
    assert faults.read() == (7,)
    (tmp_path / "fault-npus").write_text("{")
    with pytest.raises(DamagedFileError, match="fault-npus: is neither"):
        faults.read()
    monkeypatch.delenv("MINDX_FAULT_NPUS")
    assert faults.path() == "/user/restore/fault/config/fault-npus"
