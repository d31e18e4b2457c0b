"""Records: whole or refused; which of them belong to the same dying gasp; files that changed."""

import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic import files, place, record, records
from mindx_elastic.errors import DamagedFileError
from tests.disks import fill, small_disk

ONE = record.Record(
    job="job-1",
    framework="mindspore",
    rank=1,
    world_size=2,
    epoch=1,
    step=7,
    state=record.SAVED,
    files=(record.SavedFile("/x/a.ckpt", 5, "0" * 64),),
    groups=((0, 1),),
    fault_ranks=(0,),
    prefix="a",
    cause="SIGTERM",
    began_at="2026-01-01T00:00:00.000000+00:00",
    saved_at="2026-01-01T00:01:00.000000+00:00",
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in ("RANK_ID", "RANK", "RANK_SIZE", "WORLD_SIZE", "GROUP_INFO_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(tmp_path))
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    return tmp_path


def test_what_was_written_is_read(tmp_path) -> None:
    path = str(tmp_path / "folder" / "r.json")
    record.write(path, ONE)
    assert record.read(path) == ONE
    assert os.listdir(tmp_path / "folder") == ["r.json"]


@given(at=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_changed_byte_is_noticed(at, byte) -> None:
    data = bytearray(record.encode(ONE))
    at %= len(data)
    changed = data[at] != byte
    data[at] = byte
    try:
        found = record._decode(bytes(data))
    except DamagedFileError:
        assert changed
    else:  # white space, or an escape of the same character
        assert found == ONE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", -1),
        ("rank", True),
        ("step", "7"),
        ("state", "somehow"),
        ("groups", [[70_000]]),
        ("groups", 3),
        ("fault_ranks", ["0"]),
        ("files", [{"path": 1, "size_bytes": 5, "fingerprint": "0" * 64}]),
        ("files", [{"path": "/x", "size_bytes": 5, "fingerprint": "0"}]),
        ("job", None),
    ],
)
def test_a_wrong_type_is_refused_although_the_checksum_is_right(field, value) -> None:
    document = json.loads(record.encode(ONE))
    del document["checksum"]
    document[field] = value
    document["checksum"] = record._checksum(document)
    with pytest.raises(DamagedFileError, match=f"wrong value for {field}"):
        record._decode(json.dumps(document).encode())


def test_other_documents_are_refused() -> None:
    for data, reason in [
        (b"", "damaged"),
        (b"[]", "no JSON object"),
        (b'{"format": 2}', "has format 2"),
        (b"[" * 100_000, "damaged"),
    ]:
        with pytest.raises(DamagedFileError, match=reason):
            record._decode(data)


def at(minute: int) -> str:
    return f"2026-01-01T00:{minute:02d}:00.000000+00:00"


def leave(rank: int, **changes: object) -> record.Record:
    one = dataclasses.replace(ONE, rank=rank, files=(), **changes)
    record.write(place.record_path(rank), one)
    return one


def test_the_records_of_this_job_and_world_are_found(job) -> None:
    expected = {rank: leave(rank) for rank in (0, 1)}
    assert records.latest(2, "mindspore") == expected
    assert records.latest(2, "torch") == {}
    assert records.latest(3, "mindspore") == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"job": "another"}, "it is of job 'another', this is 'job-1'"),
        ({"world_size": 4}, "a world of 4 ranks, this one has 2"),
        ({"framework": "torch"}, "a training with torch"),
    ],
)
def test_the_record_of_another_job_or_world_is_not_used(job, caplog, changes, said) -> None:
    leave(0)
    leave(1, **changes)
    assert sorted(records.latest(2, "mindspore")) == [0]
    assert said in caplog.text


def test_a_record_under_the_name_of_another_rank_is_not_used(job, caplog) -> None:
    record.write(place.record_path(0), ONE)
    assert records.latest(2, "mindspore") == {}
    assert "it is of rank 1" in caplog.text


def test_what_a_rank_left_before_the_newest_training_began_is_not_used(job) -> None:
    leave(0, began_at=at(10), saved_at=at(20))
    leave(1, began_at=at(1), saved_at=at(9))
    assert sorted(records.latest(2, "mindspore")) == [0]
    leave(1, began_at=at(11), saved_at=at(15))  # it began later and ended sooner: the same one
    assert sorted(records.latest(2, "mindspore")) == [0, 1]


def test_a_damaged_record_is_named_and_not_used(job, caplog) -> None:
    leave(0)
    leave(1)
    with open(place.record_path(1), "r+b") as file:
        file.truncate(100)
    assert sorted(records.latest(2, "mindspore")) == [0]
    assert "the record of rank 1 is not used" in caplog.text
    assert "rank_1.json" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 70_000, (16 << 20) + 1, 40 << 20])
def test_files_that_were_cut_zeroed_extended_or_removed_are_noticed(tmp_path, size) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(min(size, 1 << 20)) + b"\1" * max(0, size - (1 << 20)))
    one = dataclasses.replace(ONE, files=(record.saved_file(str(path)),))
    record.check_files(one)
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedFileError, match="were written"):
        record.check_files(one)
    os.truncate(path, max(0, size - 1))
    if size:
        with pytest.raises(DamagedFileError, match="were written"):
            record.check_files(one)
        os.truncate(path, size // 2)
        os.truncate(path, size)  # the rest reads as zeros
        with pytest.raises(DamagedFileError, match="has changed"):
            record.check_files(one)
    path.unlink()
    with pytest.raises(DamagedFileError, match="is missing"):
        record.check_files(one)


def test_who_can_be_loaded_from(job, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"whole")
    saved = record.saved_file(str(path))
    gone = record.SavedFile(str(tmp_path / "gone"), 1, "0" * 64)
    found = [
        dataclasses.replace(ONE, rank=0, files=(saved,)),
        dataclasses.replace(ONE, rank=1, files=(gone,)),
        dataclasses.replace(ONE, rank=2, state=record.LEFT, files=()),
        dataclasses.replace(ONE, rank=3, state=record.FAILED, files=()),
        dataclasses.replace(ONE, rank=4, files=(saved,)),
    ]
    assert records.usable(found, {4}) == {0: 7}
    assert "rank 1 is not loaded from" in caplog.text
    assert "rank 4 is not loaded from: its chip" in caplog.text


def test_a_full_disk_leaves_the_old_record_and_no_rest(tmp_path) -> None:
    with small_disk(tmp_path / "disk", 64):
        path = str(tmp_path / "disk" / "r.json")
        record.write(path, ONE)
        fill(tmp_path / "disk")
        with pytest.raises(OSError, match="space"):
            record.write(path, dataclasses.replace(ONE, step=8))
        assert record.read(path) == ONE
        assert sorted(os.listdir(tmp_path / "disk")) == ["filler", "r.json"]


def test_a_file_is_published_at_once(tmp_path) -> None:
    (tmp_path / "draft").write_bytes(b"new")
    (tmp_path / "final").write_bytes(b"old")
    files.publish(str(tmp_path / "draft"), str(tmp_path / "final"))
    assert (tmp_path / "final").read_bytes() == b"new"
    assert not (tmp_path / "draft").exists()
