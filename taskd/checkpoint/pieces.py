"""Which bytes of a state this rank writes: decided by each writer alone, and alike on all.

    Piece            exactly as given: the caller knows that nobody else writes it
    DTensor          the local shard, shared by rows among the writers that hold it
    plain tensor     on all writers: shared by rows among them
    anything else    a plain value, written by the first writer
    Held             a plain tensor, Piece or value that only some ranks have: the same, among the
        writers of these; as a whole by the first of them, if it need not be alike on all

"Shared" means: the tensors with the same holders are laid end to end, sorted by name, and the line
of bytes is cut into equal parts, at the beginning of a row. So the parts are even and no rank needs
to ask another one. Where ranks that are not among these holders may write the same tensor (replicas
of a tensor-parallel model, each on a mesh of its own), it is cut in the same places by all of them,
however many write: only whole cuts are shared.
"""

import ctypes
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.tensor import DTensor

from taskd.checkpoint.cast import plain
from taskd.checkpoint.dcp import internal
from taskd.errors import CheckpointError

# A piece is copied off its device, and read back, as a whole: this bounds the memory that saving
# and loading need beside the state.
MAX_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Part of a tensor of `global_shape`: the box of the shape of `tensor` at `offsets`.

    `may_repeat`: others may write the same piece, and it is not known whether theirs has the same
    content: it is compared when the checkpoint is published. Cut by its shape alone, as theirs is.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    may_repeat: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Piece":
        """What this rank holds of a tensor: the local shard of a DTensor, else all of it.

        Of a cast the tensor within. Needs no process group.

        Raises:
            CheckpointError: a DTensor whose values are not final (partial sums), or whose mesh this
                rank is not in.
        """
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), (0,) * tensor.dim(), plain(tensor).detach())
        if tensor.device_mesh.get_coordinate() is None:
            raise CheckpointError(f"this rank holds nothing of a DTensor on {tensor.device_mesh}")
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                f"a DTensor with placements {tensor.placements} holds partial "
                "sums: redistribute it first"
            )
        with torch.no_grad():
            local = tensor.detach().to_local()
        (chunk,) = internal(planner_helpers, "_create_chunk_list")(tensor)
        return cls(tuple(tensor.shape), tuple(chunk.offsets), plain(local).detach())


class Pieces(tuple[Any, ...]):
    """Several parts of one tensor: Piece, DTensor, or Held."""

    __slots__ = ()


@dataclass(frozen=True)
class Held:
    """A plain tensor, a Piece or a plain value of which `holders`, and no others, have a copy.

    `is_alike` False: a tensor that may be another one, or missing, on each of them.
    """

    value: Any
    holders: tuple[int, ...]
    is_alike: bool = True


def divide(
    state: Mapping[str, Any], rank: int, writers: Sequence[int], world_size: int
) -> tuple[list[tuple[str, Piece]], list[tuple[str, Any]]]:
    """What `rank` writes.

    Pieces of at most MAX_PIECE_BYTES (a single row may be larger), and plain values. Ranks of the
    world that are none of `writers` are dead: others may write what is left of theirs.

    Raises:
        CheckpointError: a tensor that cannot be saved, by name.
    """
    shared: dict[tuple[int, ...], list[tuple[str, Piece]]] = {}
    pieces: list[tuple[str, Piece]] = []
    values: list[tuple[str, Any]] = []
    for name in sorted(state):
        for value in state[name] if isinstance(state[name], Pieces) else (state[name],):
            holders, content = _holders(name, value, rank, writers, world_size)
            if isinstance(content, Piece):
                _check(name, content)
                if isinstance(value, Held) and not value.is_alike:
                    # not in a line that all of them cut alike
                    pieces += [(name, content)] if holders and rank == holders[0] else []
                elif isinstance(value, Piece):
                    pieces.append((name, content))
                else:
                    cuts = _split(content) if content.may_repeat else (content,)
                    shared.setdefault(holders, []).extend((name, cut) for cut in cuts)
            elif holders and rank == holders[0]:
                values.append((name, content))
    for holders, line in shared.items():
        pieces += _share(line, holders.index(rank), len(holders))
    return [(name, small) for name, piece in pieces for small in _split(piece)], values


def _holders(
    name: str, value: Any, rank: int, writers: Sequence[int], world_size: int
) -> tuple[tuple[int, ...], Any]:
    """The writers that have it, and what it is.

    A Piece if it is a tensor, or None for a DTensor of which this rank has nothing.
    """
    holders: Collection[int] = writers
    if isinstance(value, Held):
        value, holders = value.value, value.holders
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return (), None
        holders = holders_of(name, value, rank)
    content = Piece.of(value) if isinstance(value, torch.Tensor) else value
    if isinstance(value, DTensor) and may_repeat(value, rank, world_size):
        content = replace(content, may_repeat=True)
    return tuple(writer for writer in writers if writer in holders), content


def _check(name: str, piece: Piece) -> None:
    tensor = piece.tensor
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__} with layout {tensor.layout}: "
            "only dense tensors and DTensors can be saved"
        )
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name} is on the meta device: it has no values yet")
    shape, offsets = piece.global_shape, piece.offsets
    fits = len(shape) == len(offsets) == tensor.dim() and all(
        offset >= 0 and offset + size <= whole
        for offset, size, whole in zip(offsets, tensor.shape, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"{name}: a piece of shape {tuple(tensor.shape)} at {offsets} does not lie in {shape}"
        )


def holders_of(name: str, tensor: DTensor, rank: int) -> tuple[int, ...]:
    """The ranks with the same shard: they differ in the mesh's replicating dimensions only."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    numbers = _ranks_on(mesh, rank)
    ranks = set(numbers[index].reshape(-1).tolist())
    if int(numbers[tuple(coordinate)]) != rank:
        raise CheckpointError(
            f"{name}: rank {rank} has another number in its mesh {mesh}: give it "
            "as Piece.of(tensor)"
        )
    return tuple(sorted(ranks))


def may_repeat(tensor: DTensor, rank: int, world_size: int) -> bool:
    """Whether some ranks of the world, dead ones included, are not on its mesh.

    They may have a mesh of the same form, beside it. What they have under the same name is the same
    (replicas of a tensor-parallel model) or another thing (the next stage of a pipeline): the
    meshes do not tell.
    """
    on_mesh = _ranks_on(tensor.device_mesh, rank).reshape(-1).tolist()
    return not {*range(world_size)}.issubset(on_mesh)


def _ranks_on(mesh: Any, rank: int) -> torch.Tensor:
    """The rank at each place of a DeviceMesh.

    A slice of one needs the default group to say so, which a dump has no more.
    """
    if dist.is_initialized() or not hasattr(mesh, "_layout"):  # torch before 2.10 knows the slice
        numbers: torch.Tensor = mesh.mesh
        return numbers
    full = mesh._layout.remap_to_tensor(mesh._rank_map)
    return full[0] if full.size(0) == 1 else full[(full == rank).nonzero()[0, 0]]  # type: ignore[no-any-return]


def _share(line: list[tuple[str, Piece]], index: int, count: int) -> Iterator[tuple[str, Piece]]:
    """The rows that begin in part `index` of `count` equal parts of the line.

    Of what may repeat, the pieces that begin there.
    """
    total = sum(piece.tensor.nbytes for _, piece in line)
    low, high = total * index // count, total * (index + 1) // count
    start = 0
    for name, piece in line:
        size = piece.tensor.nbytes
        if not size:
            # A whole tensor without elements is written so that it exists; an empty shard of
            # another one is not.
            if index == 0 and not math.prod(piece.global_shape):
                yield name, piece
            continue
        rows = piece.tensor.shape[0] if piece.tensor.dim() and not piece.may_repeat else 1
        row_bytes = size // rows
        first, last = (min(max(-(-(edge - start) // row_bytes), 0), rows) for edge in (low, high))
        if first < last:
            yield name, piece if piece.may_repeat else _rows(piece, first, last)
        start += size


def _split(piece: Piece) -> Iterator[Piece]:
    size = piece.tensor.nbytes
    rows = piece.tensor.shape[0] if piece.tensor.dim() and size else 1
    step = max(1, MAX_PIECE_BYTES * rows // max(size, 1))
    if step >= rows:
        yield piece
    else:
        yield from (_rows(piece, first, min(first + step, rows)) for first in range(0, rows, step))


def _rows(piece: Piece, first: int, last: int) -> Piece:
    if not piece.tensor.dim() or (first == 0 and last == piece.tensor.shape[0]):
        return piece
    offsets = (piece.offsets[0] + first, *piece.offsets[1:])
    return replace(piece, offsets=offsets, tensor=piece.tensor[first:last])


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor that has no more memory behind it than its own.

    `torch.save` writes, and DCP copies, all the memory behind a tensor. No copy is made on the CPU
    where the values are contiguous: the result is valid as long as `tensor` is.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if (
        tensor.device.type != "cpu"
        or tensor.untyped_storage().nbytes() == tensor.nbytes
        or not tensor.nbytes
    ):
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
