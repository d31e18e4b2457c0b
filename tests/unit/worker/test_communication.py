"""Who is taken for a victim of somebody else's death, by its exception."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from taskd.worker.exceptions.communication import is_communication_error

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH = Path(torch.__file__).parent


def caught(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def of_module(name: str, body: str, **names: Any) -> Callable[[], object]:
    """A function of the library module `name`."""
    file = TORCH.parent / Path(*name.split(".")).with_suffix(".py")
    module = {"__name__": name, **names}
    exec(compile(f"def call():\n    {body}", file, "exec"), module)
    return module["call"]


def raiser(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    def call() -> None:
        raise error from cause

    return caught(call)


def refused() -> None:
    """As at a data service that is away."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        socket.create_connection(free.getsockname())


class Failing(Dataset[int]):
    """Fails in the process of a loader."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.fail()
        return index


def speak_of_gloo() -> None:
    raise RuntimeError("gloo: connection closed by peer")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


LOADER_DIED = "DataLoader worker (pid(s) 5) exited unexpectedly"


class TestOfTheScript:
    def test_a_connection_of_its_own(self) -> None:
        error = caught(refused)
        assert isinstance(error, ConnectionError)
        assert not is_communication_error(error)
        assert not is_communication_error(raised_from(ValueError("no sample"), error))

    def test_one_within_a_forward_pass_of_fsdp(self) -> None:
        forward = of_module("torch.distributed.fsdp._runtime_utils", "model()", model=refused)
        assert not is_communication_error(caught(forward))

    @pytest.mark.parametrize("fail", [refused, speak_of_gloo])
    def test_what_a_process_of_a_loader_has_raised(self, fail) -> None:
        error = caught(lambda: list(DataLoader(Failing(fail), num_workers=1)))
        assert "in DataLoader worker process" in str(error)
        assert not is_communication_error(error)

    def test_a_process_of_a_loader_that_has_died(self) -> None:
        error = caught(lambda: list(DataLoader(Failing(die), num_workers=1)))
        assert "DataLoader worker" in str(error)
        assert not is_communication_error(error)

    def test_its_connection_that_was_reset(self) -> None:
        reset = caught(
            of_module("torch.utils.data.dataloader", "raise ConnectionResetError(104, 'reset')")
        )
        assert not is_communication_error(raised_from(RuntimeError(LOADER_DIED), reset))


class TestVictims:
    def test_a_store_that_is_away(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        error = caught(
            lambda: dist.TCPStore(
                "127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=0.1)
            )
        )
        assert is_communication_error(error)
        assert is_communication_error(raised_from(ConnectionError("of the script"), error))

    @pytest.mark.parametrize(
        "name", ["torch.distributed.distributed_c10d", "torch.distributed.elastic.etcd"]
    )
    def test_a_connection_of_torch_distributed(self, name) -> None:
        error = caught(of_module(name, "raise ConnectionResetError(104, 'reset')"))
        assert is_communication_error(error)
        assert is_communication_error(raised_from(ValueError("in the script"), error))

    def test_one_in_a_library_that_a_store_uses(self) -> None:
        inner = of_module("urllib3.connection", "raise ConnectionRefusedError(111, 'refused')")
        outer = of_module("torch.distributed.elastic.store", "inner()", inner=inner)
        assert is_communication_error(caught(outer))

    @pytest.mark.parametrize(
        "text",
        [
            "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
            "NCCL communicator was aborted on rank 1",
            "Caught RuntimeError in replica 0 on device 0.\nnccl",
        ],
    )
    def test_a_collective(self, text) -> None:
        assert is_communication_error(caught(raiser(RuntimeError(text))))

    def test_one_whose_loader_dies_as_well(self) -> None:
        """The handler of SIGCHLD raises where the other exception is handled."""
        gloo = caught(raiser(RuntimeError("gloo: connection closed by peer")))
        assert is_communication_error(raised_from(RuntimeError(LOADER_DIED), gloo))

    def test_a_cause_that_was_never_raised(self) -> None:
        assert is_communication_error(raised_from(ValueError("x"), ConnectionResetError("reset")))
