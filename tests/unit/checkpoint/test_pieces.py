from __future__ import annotations

import math

import pytest
import torch

from taskd.checkpoint import values
from taskd.checkpoint.pieces import MAX_PIECE_BYTES, Held, Piece, divide, own_memory
from taskd.errors import CheckpointError, CorruptCheckpointError


def bytes_of(found) -> int:
    return sum(piece.tensor.nbytes for _, piece in found)


@pytest.mark.parametrize("writers", [(0,), (0, 1), (5, 2, 9), tuple(range(64))])
def test_replicated_tensors_are_written_once_and_evenly(writers) -> None:
    generator = torch.Generator().manual_seed(len(writers))
    state = {
        f"t{index}": torch.randn(shape, generator=generator)
        for index, shape in enumerate(
            [(1000, 40), (7,), (), (0, 3), (1, 500), (4096, 2), *[(3, 5)] * 50]
        )
    }
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in state.items()}
    sizes = []
    whole_empties = 0
    for rank in writers:
        found, plain = divide(state, rank, writers, 64)
        assert not plain
        sizes.append(bytes_of(found))
        for name, piece in found:
            assert piece.global_shape == tuple(state[name].shape)
            if not piece.tensor.numel():
                whole_empties += 1
            index = tuple(
                slice(offset, offset + size)
                for offset, size in zip(piece.offsets, piece.tensor.shape, strict=True)
            )
            assert torch.equal(piece.tensor, state[name][index])
            covered[name][index] += 1
    assert all((count == 1).all() for count in covered.values())
    assert whole_empties == 1
    largest_row = 500 * 4
    assert max(sizes) <= sum(sizes) / len(writers) + largest_row


def test_plain_values_are_written_by_the_first_writer_alone() -> None:
    state = {"rate": 0.1, "weight": torch.ones(2)}
    assert divide(state, 3, (3, 1), 4)[1] == [("rate", 0.1)]
    assert divide(state, 1, (3, 1), 4)[1] == []


def test_what_need_not_be_alike_is_written_by_one_and_divides_nothing_else() -> None:
    """Its size on one rank says nothing of that on another, and it may be missing there."""
    weight, written = torch.arange(64.0).view(16, 4), []
    for rank, sizes in enumerate([(3,), (500, 7), ()]):
        caches = {
            f"a{index}": Held(torch.ones(size), (1, 2), is_alike=False)
            for index, size in enumerate(sizes)
        }
        written.append(
            divide(
                {**caches, "weight": weight} if rank else {"weight": weight}, rank, (0, 1, 2), 3
            )[0]
        )
    assert [[name for name, _ in found] for found in written] == [
        ["weight"],
        ["a0", "a1", "weight"],
        ["weight"],
    ]
    assert torch.equal(torch.cat([found[-1][1].tensor for found in written]), weight)


def test_large_tensors_are_cut_so_that_memory_stays_bounded() -> None:
    tensor = torch.empty(3 * MAX_PIECE_BYTES // 4 // 1024 + 1, 1024)
    found, _ = divide({"t": tensor}, 0, (0,), 1)
    assert len(found) == 4
    assert all(piece.tensor.nbytes <= MAX_PIECE_BYTES for _, piece in found)
    assert sum(piece.tensor.numel() for _, piece in found) == tensor.numel()
    single_row, _ = divide({"t": torch.empty(1, MAX_PIECE_BYTES)}, 0, (0,), 1)
    assert len(single_row) == 1


@pytest.mark.parametrize(("value", "reason"), [
    (torch.eye(3).to_sparse(), "layout torch.sparse"),
    (torch.ones(3, device="meta"), "meta device"),
    (Piece((4, 4), (3, 0), torch.ones(2, 4)), "does not lie in"),
    (Piece((4, 4), (0,), torch.ones(2, 4)), "does not lie in"),
    (Piece((4,), (-1,), torch.ones(2)), "does not lie in"),
])  # fmt: skip
def test_what_cannot_be_saved_is_refused_by_name(value, reason) -> None:
    with pytest.raises(CheckpointError, match=f"the_name.*{reason}"):
        divide({"the_name": value}, 0, (0,), 1)


@pytest.mark.parametrize("tensor", [
    torch.arange(12.0), torch.arange(12.0)[3:7], torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(12.0).reshape(3, 4)[:, 1:3],
    torch.ones(1).expand(5), torch.randn(4, dtype=torch.complex64).conj(),
    torch.randn(8, dtype=torch.complex64)[2:4],
    torch.tensor([True, False, True])[1:], torch.arange(6).to(torch.float8_e4m3fn)[2:],
    torch.empty(0, 3), torch.tensor(2.5), torch.arange(3)[1],
])  # fmt: skip
def test_own_memory_has_the_same_values_and_nothing_behind_them(tensor) -> None:
    own = own_memory(tensor)
    assert torch.equal(
        own.float() if own.dtype.itemsize == 1 else own,
        tensor.float() if tensor.dtype.itemsize == 1 else tensor,
    )
    assert own.dtype == tensor.dtype
    assert own.untyped_storage().nbytes() == own.nbytes


def test_contiguous_memory_is_not_copied() -> None:
    tensor = torch.arange(1000.0)
    assert own_memory(tensor[10:500]).data_ptr() == tensor[10:500].data_ptr()


# ---------------------------------------------------------------- values


def test_plain_values_come_back_as_they_were() -> None:
    import collections

    value = {
        "a": [1, -(2**70), 0.1, math.inf, 1 + 2j, None, True, "text", b"\x00bytes"],
        3: (torch.Size([1]), torch.float16, {"x": {}}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter([3, 3, 5]),
        b"": [b"", (), "", [], {}],
    }
    back = values.unpack(values.pack("value", value))
    assert back == value
    assert type(back["ordered"]) is collections.OrderedDict
    assert type(back["counter"]) is collections.Counter


def test_a_tensor_in_a_value_takes_its_own_bytes_only() -> None:
    large = torch.zeros(100_000)
    packed = values.pack("value", [large[:3], torch.nn.Parameter(torch.ones(2))])
    assert len(packed) < 5000
    first, second = values.unpack(packed)
    assert torch.equal(first, large[:3])
    assert torch.equal(second, torch.ones(2))


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    import enum

    import numpy as np

    back = values.unpack(
        values.pack(
            "value",
            [
                np.float64(0.5),
                np.float32(0.25),
                np.int64(3),
                np.bool_(True),
                enum.IntEnum("E", "A").A,
            ],
        )
    )
    assert back == [0.5, 0.25, 3, True, 1]
    assert [type(item) for item in back] == [float, float, int, bool, int]


class Custom:
    pass


@pytest.mark.parametrize(
    "value", [Custom(), {"deep": [Custom()]}, {1, 2}, print, torch.ones(1, device="meta")]
)
def test_what_could_not_be_loaded_safely_is_refused_when_it_is_saved(value) -> None:
    with pytest.raises(CheckpointError, match="the_name"):
        values.pack("the_name", value)


def test_integers_are_refused_from_the_length_on_that_could_not_be_loaded() -> None:
    import enum

    longest = [2**2039 - 1, 1 - 2**2039, {2**2038: True}]
    assert values.unpack(values.pack("value", longest)) == longest
    too_long = [2**2039, -(2**2040), {2**20_000: 1}, enum.IntEnum("E", {"A": 2**2039}).A]
    for value in too_long:
        with pytest.raises(CheckpointError, match=r"the_name\[0\].* is an int of \d+ bits"):
            values.pack("the_name", [value])


def test_numpy_arrays_are_refused() -> None:
    import numpy as np

    with pytest.raises(CheckpointError, match="ndarray"):
        values.pack("the_name", np.zeros(3))


def test_damaged_bytes_are_refused() -> None:
    packed = values.pack("value", [1, 2, 3])
    for length in range(0, len(packed), 7):
        with pytest.raises(CorruptCheckpointError):
            values.unpack(packed[:length])
