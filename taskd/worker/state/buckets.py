"""The bucket layout of DistributedDataParallel, kept across a recovery.

DDP sums gradients bucket by bucket. It starts with a layout made from the order of the parameters
and makes a better one, once, from the order in which the first backward pass produced the
gradients. A DDP built anew in a recovery would start with the first layout again: sums would
associate differently for one step, and the run would no longer be bit-identical.

So `install()` wraps DDP's constructor. In a first entry it notes the order of the first backward
pass and records the layout that DDP is about to make. In a recovery it hands the recorded layout to
the constructor, and leaves out the broadcast of rank 0's weights, which would overwrite what the
survivors hold. Layouts are kept by order of construction within an entry, here and in the black
box. All ranks agree on one before they use it.

Not covered: static_graph=True and a fault at version 1 exactly (DDP makes its layout two steps late
there); a warning says so.
"""

import functools
import inspect
import json
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from taskd.worker import internals
from taskd.worker.life import Life, current

log = logging.getLogger(__name__)

_original_init: Callable[..., None] | None = None


@dataclass(frozen=True)
class Layout:
    """Buckets of parameter indices as they are reduced from the step after `valid_from` on."""

    valid_from: int
    buckets: list[list[int]]
    first_cap: int
    cap: int

    def fits(self, count: int) -> bool:
        """True if it covers exactly `count` parameters."""
        return sorted(index for bucket in self.buckets for index in bucket) == list(range(count))


class _Layouts:
    """The layouts of one life, by order of construction within an entry."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.by_order: dict[int, Layout] = {}
        self.next_order = 0
        self.built: dict[int, weakref.ref[DistributedDataParallel]] = {}  # in this entry
        self.hooks: list[Callable[[], None]] = []  # what takes the hooks of this entry off again
        if life.records.inherited_layout:
            self.by_order = _decode(life.records.inherited_layout)

    def record(self, order: int, layout: Layout | None) -> None:
        """Keep a layout, here and for a replacement. None: forget it."""
        if layout is None:
            self.by_order.pop(order, None)
        else:
            self.by_order[order] = layout
        if self.life.box is not None:
            self.life.box.write_layout(_encode(self.by_order))

    def take_order(self) -> int:
        """The number of the DDP that is being built."""
        order, self.next_order = self.next_order, self.next_order + 1
        return order


def _layouts_of(life: Life) -> _Layouts:
    layouts: _Layouts | None = life.records.layouts
    if layouts is None:
        layouts = life.records.layouts = _Layouts(life)
    return layouts


def end_entry(life: Life) -> None:
    """The next DDP is the first of a new entry.

    Modules that outlive this one are left without hooks of ours.
    """
    layouts = life.records.layouts
    if layouts is not None:
        layouts.next_order = 0
        layouts.built.clear()
        while layouts.hooks:
            layouts.hooks.pop()()


def recorded(life: Life) -> bytes:
    """The layouts that are in use, for a checkpoint; b"" if there are none."""
    by_order = _layouts_of(life).by_order
    return _encode(by_order) if by_order else b""


def reinstate(life: Life, data: bytes) -> None:
    """Let the DDPs of this entry, built already or not, use the layouts that a checkpoint holds."""
    if not _is_known():
        return
    layouts = _layouts_of(life)
    while layouts.hooks:  # nothing is to be learnt any more
        layouts.hooks.pop()()
    for order, layout in _decode(data).items():
        layouts.record(order, layout)
        ddp = layouts.built[order]() if order in layouts.built else None
        if ddp is None:
            continue
        parameters, expects_sparse = ddp._build_params_for_reducer()
        with _prescribed(layout):
            ddp._ddp_init_helper(
                parameters,
                expects_sparse,
                ddp._build_debug_param_to_name_mapping(parameters),
                ddp.static_graph,
            )
        _confirm(life, ddp, order)


def _encode(by_order: dict[int, Layout]) -> bytes:
    return zlib.compress(
        json.dumps({order: asdict(layout) for order, layout in by_order.items()}).encode()
    )


def _decode(data: bytes) -> dict[int, Layout]:
    try:
        return {
            int(order): Layout(**fields)
            for order, fields in json.loads(zlib.decompress(data)).items()
        }
    except (zlib.error, ValueError, TypeError):
        log.warning(
            "the DDP bucket layout in the black box cannot be read: the first step after "
            "this recovery may round differently"
        )
        return {}


# ---------------------------------------------------------------- the seam in torch


def install() -> None:
    """Wrap DDP's constructor. Does nothing the second time."""
    global _original_init  # noqa: PLW0603
    if _original_init is not None:
        return
    original = _original_init = DistributedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        life = current()
        if life is None or not life.interrupts.in_recoverable:
            original(self, *args, **kwargs)
            return
        _build(life, self, original, signature.bind(self, *args, **kwargs))

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def uninstall() -> None:
    """Opposite of `install`."""
    global _original_init  # noqa: PLW0603
    if _original_init is not None:
        DistributedDataParallel.__init__ = _original_init  # type: ignore[method-assign]
        _original_init = None


def _is_known() -> bool:
    """Whether DDP still makes and tells its buckets in the way that this module knows."""
    return internals.has(
        "the buckets of DDP",
        (dist, "_compute_bucket_assignment_by_size"),
        *(
            (DistributedDataParallel, name)
            for name in (
                "_build_params_for_reducer",
                "_ddp_init_helper",
                "_build_debug_param_to_name_mapping",
                "_get_ddp_logging_data",
            )
        ),
    )


def _build(
    life: Life,
    ddp: DistributedDataParallel,
    original: Callable[..., None],
    bound: inspect.BoundArguments,
) -> None:
    layouts = _layouts_of(life)
    order = layouts.take_order()
    layouts.built[order] = weakref.ref(ddp)
    plan, records = life.plan, life.records
    is_restored = any(holding.is_restored for holding in records.states.values())
    version = records.version if is_restored else None
    if not _is_known():
        if plan.version is not None and version is None:
            bound.arguments["init_sync"] = False  # as below
        original(*bound.args, **bound.kwargs)
        return
    if plan.version is None:
        if (
            order in layouts.by_order
            and life.saving.checkpoint is not None
            and records.version == life.saving.checkpoint.manifest.version
        ):
            with _prescribed(layouts.by_order[order]):  # a fresh start from disk, after restore()
                original(*bound.args, **bound.kwargs)
            _confirm(life, ddp, order)
            return
        if order in layouts.by_order:
            layouts.record(order, None)
        original(*bound.args, **bound.kwargs)
        _learn(life, ddp, order)
        return
    if version is None:
        # Before restore(): survivors' models may hold the trained weights, a replacement's do not.
        bound.arguments["init_sync"] = False
        version = plan.version
    layout = layouts.by_order.get(order)
    if layout is not None and layout.valid_from > version:
        layouts.record(order, None)  # learnt in a step that is done again
        layout = None
    layout = _agree(life, layout, bound.arguments.get("process_group"))
    with _prescribed(layout):
        original(*bound.args, **bound.kwargs)
    if layout is None:
        if version and _is_rebuilding(ddp):
            log.warning(
                "rank %d: no DDP bucket layout was recorded before version %d: the first "
                "steps after this recovery may round differently",
                life.rank,
                version,
            )
        _learn(life, ddp, order)
    else:
        layouts.record(order, layout)
        _confirm(life, ddp, order)


@contextmanager
def _prescribed(layout: Layout | None) -> Iterator[None]:
    """Within it, the function that DDP's constructor asks for a layout answers with `layout`."""
    if layout is None:
        yield
        return
    compute = dist._compute_bucket_assignment_by_size

    @functools.wraps(compute)
    def answer(
        tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[int]]:
        if not layout.fits(len(tensors)):
            log.warning(
                "the recorded DDP bucket layout is for %d parameters, this model has %d: "
                "the first step may round differently",
                sum(map(len, layout.buckets)),
                len(tensors),
            )
            natural: tuple[list[list[int]], list[int]] = compute(tensors, *args, **kwargs)
            return natural
        # DDP reverses both lists.
        limits = [layout.first_cap] + [layout.cap] * (len(layout.buckets) - 1)
        return layout.buckets[::-1], limits[::-1]

    dist._compute_bucket_assignment_by_size = answer
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = compute


def _agree(life: Life, layout: Layout | None, group: Any) -> Layout | None:
    """One layout for all ranks of the group: that of the lowest rank that has one.

    Unequal buckets would sum unlike gradients.

    One small collective if all have the same; the layout itself travels only if they differ.
    """
    data = b"" if layout is None else _encode({0: layout})
    group = group if group is not None else dist.group.WORLD
    device = _device_of(group)
    size = dist.get_world_size(group)
    mark = torch.tensor([zlib.crc32(data) + 1 if data else 0], dtype=torch.int64, device=device)
    marks = [torch.zeros_like(mark) for _ in range(size)]
    dist.all_gather(marks, mark, group=group)
    known = [int(m.item()) for m in marks]
    if len(set(known)) == 1:
        return layout
    source = next(rank for rank, value in enumerate(known) if value)
    log.info("rank %d: DDP bucket layout taken from rank %d", life.rank, source)
    box = [layout]
    dist.broadcast_object_list(box, group_src=source, group=group, device=device)
    return box[0]


def _device_of(group: Any) -> torch.device:
    backends = str(dist.get_backend_config(group)).lower()
    for kind in ("cuda", "npu", "xpu"):
        module = getattr(torch, kind, None)
        if (
            f"{kind}:" in backends
            and "cpu:" not in backends
            and module is not None
            and module.is_available()
        ):
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


# ---------------------------------------------------------------- learning a layout


def _learn(life: Life, ddp: DistributedDataParallel, order: int) -> None:
    """Note in which order the first backward pass with communication produces the gradients.

    DDP makes its layout from that.
    """
    if _is_rebuilding(ddp):
        _FirstBackward(life, ddp, order)


def _is_rebuilding(ddp: DistributedDataParallel) -> bool:
    """False if DDP keeps its first layout for good."""
    return (ddp.static_graph or not ddp.find_unused_parameters) and getattr(
        ddp, "reducer", None
    ) is not None


class _FirstBackward:
    """Hooks on every parameter for the one backward pass that DDP makes its layout from."""

    def __init__(self, life: Life, ddp: DistributedDataParallel, order: int) -> None:
        self._life, self._ddp, self._order = life, weakref.ref(ddp), order
        # as the reducer numbers them; a sparse gradient has a bucket of its own
        parameters, expects_sparse = ddp._build_params_for_reducer()
        self._parameters, self._expects_sparse = list(parameters), list(expects_sparse)
        self._arrived: list[int] = []
        # With a static graph DDP looks at the second pass, after it counted in the first one.
        self._passes_to_skip = 1 if ddp.static_graph else 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self._on_gradient, index)
            )
            for index, parameter in enumerate(self._parameters)
        ]
        _layouts_of(life).hooks.append(self._remove)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, index: int, _parameter: torch.Tensor) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync:
            return  # inside no_sync(): DDP does not look either
        self._arrived.append(index)
        if len(self._arrived) < len(self._parameters):
            return
        if self._passes_to_skip:
            self._passes_to_skip -= 1
            self._arrived = []
            return
        self._finish(ddp)

    def _finish(self, ddp: DistributedDataParallel) -> None:
        self._remove()
        life = self._life
        limits = internals.attempt("the buckets of DDP", functools.partial(_limits_of, ddp))
        if limits is None:
            return
        buckets, _ = dist._compute_bucket_assignment_by_size(
            [self._parameters[index] for index in self._arrived],
            limits,
            self._expects_sparse,  # looked up by the number of the parameter
            self._arrived,
        )
        layout = Layout(
            (life.records.version or 0) + 1,
            [list(bucket) for bucket in buckets],
            limits[0],
            limits[-1],
        )
        _layouts_of(life).record(self._order, layout)
        _confirm(life, ddp, self._order)


def _limits_of(ddp: DistributedDataParallel) -> list[int]:
    """How many bytes of gradients go into each bucket; the last is that of all further ones."""
    config = getattr(ddp, "_bucket_config", None)
    if config is None:  # before torch 2.12
        first = dist._DEFAULT_FIRST_BUCKET_BYTES
        return list(getattr(ddp, "bucket_bytes_cap_list", ())) or [
            first if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap,
            ddp.bucket_bytes_cap,
        ]
    return list(config.per_bucket_bytes_caps) or [
        config.first_bucket_bytes_cap,
        config.bucket_bytes_cap,
    ]


class _Confirmation:
    """Forward hook: compares the recorded layout with what DDP says (in its third forward pass)."""

    def __init__(
        self, life: Life | None = None, ddp: DistributedDataParallel | None = None, order: int = 0
    ) -> None:
        self._life, self._order = life, order
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self.remove: Callable[[], None] = lambda: None

    def __call__(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None or self._life is None:
            self.remove()
            return
        text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        if not text:
            return
        self.remove()
        buckets = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
        layouts = _layouts_of(self._life)
        layout = layouts.by_order.get(self._order)
        if layout is None or layout.buckets != buckets:
            log.warning(
                "rank %d: DDP uses other buckets than foreseen from the first backward pass: a "
                "recovery before this point may have changed the rounding of one step",
                self._life.rank,
            )
            caps = (0, 0) if layout is None else (layout.first_cap, layout.cap)
            layouts.record(
                self._order, Layout((self._life.records.version or 0) + 1, buckets, *caps)
            )

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Confirmation":
        return _Confirmation()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Confirmation, ())


def _confirm(life: Life, ddp: DistributedDataParallel, order: int) -> None:
    if not _is_rebuilding(ddp):
        return
    mark = _Confirmation(life, ddp, order)
    mark.remove = ddp.module.register_forward_hook(mark).remove
    _layouts_of(life).hooks.append(mark.remove)
