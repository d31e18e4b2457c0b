"""Group files: read by our own parser, refused when damaged, found from one rank's path."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic import groups
from mindx_elastic.errors import DamagedFileError
from tests.unit.mindx_elastic.group_bytes import field, group_map, ranks, varint

RANKS = st.lists(st.integers(0, 65_535), min_size=1, max_size=40, unique=True)


@given(restore=RANKS, other=RANKS, packed=st.booleans())
def test_the_ranks_to_restore_from_are_read_whatever_else_is_there(restore, other, packed) -> None:
    data = group_map(restore, others=[("8-123", other), ("hccl_world", other)], packed=packed)
    later = field(7, b"of a later version") + varint(9 << 3) + varint(1 << 40)
    assert groups.decode(data) == tuple(restore)
    assert groups.decode(data + later) == tuple(restore)


@given(restore=RANKS, data=st.data())
def test_a_file_that_was_cut_off_is_refused_or_says_less_and_nothing_else_happens(
    restore, data
) -> None:
    whole = group_map(restore)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(DamagedFileError):
        groups.decode(part)


@given(st.binary(max_size=200))
def test_any_bytes_are_ranks_or_refused(data) -> None:
    try:
        found = groups.decode(data)
    except DamagedFileError:
        return
    assert found
    assert all(0 <= rank <= 65_535 for rank in found)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (group_map([]), "no list of ranks"),
        (field(1, b"x"), "no list of ranks"),
        (group_map([1, 1]), "names a rank twice"),
        (group_map([70_000]), "names rank 70000"),
        (varint(2 << 3) + varint(5), "wire type 0"),
        (b"\x13", "wire type 3"),
        (b"\xff" * 11, "more than ten bytes"),
        (field(2, varint(1 << 3 | 5) + b"\0" * 4), "a rank has wire type 5"),
        (b"\x02", "number 0"),
    ],
)
def test_what_is_wrong_is_said(data, reason) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        groups.decode(data)


def write(path: pathlib.Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("name", ["device", "rank_", "device_"])
def test_the_files_of_the_others_are_beside_the_own_one(tmp_path, name) -> None:
    for rank in (0, 3, 12):
        write(tmp_path / f"{name}{rank}" / "group_info.pb", group_map([rank]))
    write(tmp_path / "elsewhere" / "group_info.pb", group_map([5]))
    own = str(tmp_path / f"{name}3" / "group_info.pb")
    found = groups.paths(own, str(tmp_path / "none"))
    assert sorted(found) == [0, 3, 12]
    assert all(groups.read(path) == (rank,) for rank, path in found.items())


def test_without_a_variable_the_paths_are_those_of_the_environment_file(tmp_path) -> None:
    paths = [
        write(tmp_path / f"device{rank}" / "group_info.pb", group_map([rank])) for rank in (0, 1)
    ]
    environment = tmp_path / "group_info_env"
    lines = [f"export GROUP_INFO_FILE_REFLECT={path}\n" for path in paths]
    environment.write_text("export OTHER=1\nnonsense\n" + "".join(lines * 2))
    assert groups.paths(None, str(environment)) == dict(enumerate(paths))


def test_a_path_that_names_no_rank_is_no_way_to_the_others(tmp_path) -> None:
    own = write(tmp_path / "group_info.pb", group_map([0]))
    with pytest.raises(DamagedFileError, match="names a rank"):
        groups.paths(own, str(tmp_path / "none"))
    with pytest.raises(DamagedFileError, match="no group file is known"):
        groups.paths(None, str(tmp_path / "none"))


def test_a_folder_a_pipe_and_a_large_file_are_refused(tmp_path) -> None:
    import os

    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(groups.MAX_BYTES + 1)
    for name, reason in [
        ("folder", "no regular file"),
        ("pipe", "no regular file"),
        ("large", "more than"),
        ("absent", "is missing"),
    ]:
        with pytest.raises(DamagedFileError, match=reason):
            groups.read(str(tmp_path / name))


def test_packed_and_single_numbers_may_be_mixed() -> None:
    assert groups.decode(field(2, ranks([1, 2]) + ranks([300, 4], packed=True))) == (1, 2, 300, 4)
