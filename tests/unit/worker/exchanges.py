"""What two ranks of a `World` send each other."""

import time

import torch
from torch import nn

from taskd.errors import StateError
from taskd.worker.objects.named import Named
from taskd.worker.objects.roles import Roles
from taskd.worker.restore import chunks, exchange
from taskd.worker.state.holding import Holding

CPU = torch.device("cpu")


def swap_bytes(member, messages):
    """What rank 1 receives of `messages`, and the seconds of processor time that it takes."""
    if member.rank == 0:
        for data in messages:
            chunks.send_bytes(data, 1, CPU)
        return None
    began = time.process_time()
    received = [chunks.receive_bytes(0, CPU) for _ in messages]
    return received == messages, time.process_time() - began


def hold(**objects):
    return Holding("train", Roles.sort("train", objects))


def exchange_state(member, build, change, *, is_late=False):
    """Rank 1 receives the state of rank 0, which `change` has changed. Returns what both said.

    `build()`: a module. With the buffers and parameters of the receiver. `is_late`: changed when it
    is held already.
    """
    model = build()
    if member.rank == 0 and not is_late:
        change(model)
    holding = hold(model=model)
    if member.rank == 0 and is_late:
        change(model)
    named = Named(holding.roles)
    try:
        if member.rank == 0:
            exchange.send(holding, named, 1, 1, is_present=True)
        else:
            exchange.receive(holding, named, 0)
    except StateError as error:
        return str(error), None
    return "", {name: tensor.tolist() for name, tensor in Named(holding.roles).tensors.items()}


class Buffers(nn.Module):
    """With the buffers `first` and `second`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.zeros(2))


def exchange_late(member, build, change):
    return exchange_state(member, build, change, is_late=True)


def make_sparse(model):
    model.first = torch.eye(2).to_sparse()


class OneBuffer(Buffers):
    """One tensor for both, as it is built."""

    def __init__(self):
        super().__init__()
        self.second = self.first


class OneParameter(nn.Module):
    """One parameter for both."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Parameter(torch.zeros(2))


def make_one(model):
    """Both buffers are one tensor, with other content."""
    model.first = model.second = torch.tensor([3.0, 4.0])


def make_two(model):
    """They are two."""
    model.first, model.second = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])


def make_two_parameters(model):
    model.second = nn.Parameter(torch.ones(2))


class Views(nn.Module):
    """Buffers whose content is not their memory in order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("conjugate", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.zeros(2, dtype=torch.complex64).conj().imag)
        self.register_buffer("expanded", torch.ones(1).expand(3))


def fill_views(model):
    number = torch.tensor([1 + 2j, 3 + 4j])
    model.conjugate, model.negative = number.conj(), number.conj().imag
    model.expanded = torch.full((1,), 5.0).expand(3)
