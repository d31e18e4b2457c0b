"""The ways in which the objects of one TrainState get the state of another."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from taskd.checkpoint.values import pack, unpack
from taskd.worker.objects import devices
from taskd.worker.objects.named import Named
from taskd.worker.restore.manifest import describe
from taskd.worker.restore.targets import Targets
from taskd.worker.saving import unpickling
from taskd.worker.state import flat
from taskd.worker.state.extras import PROTOCOL
from taskd.worker.state.own_extras import Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.worker.state.holding import Holding


def received(source: Holding, target: Holding) -> None:
    manifest, tensors = describe(source, Named(source.roles), 1, Told())
    targets = Targets(pickle.loads(pickle.dumps(manifest, 5)), target, Named(target.roles))
    for tensor, room in zip(tensors, targets.tensors, strict=True):
        room.copy_(tensor)
    targets.finish()


def read(source: Holding, target: Holding, carry: Callable[[Any], Any]) -> None:
    tensors, plain = flat.flatten(source, Named(source.roles))
    plain, named = carry(plain), Named(target.roles)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    places = flat.targets(target, named, plain, shapes)
    for name, place in places.items():
        place.detach().copy_(tensors[name])
    flat.load(target, named, plain, places)


WAYS: dict[str, Callable[[Holding, Holding], None]] = {
    "another rank": received,
    "checkpoint": lambda one, other: read(one, other, lambda plain: unpack(pack("x", plain))),
    "snapshot": lambda one, other: read(
        one, other, lambda plain: unpickling.loads(devices.dumps(plain, PROTOCOL))
    ),
}
