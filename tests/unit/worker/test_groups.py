"""Groups: which sockets an abort shuts down."""

import socket

import pytest

from taskd.errors import Interrupted
from taskd.worker.groups import Groups


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected TCP pair, as gloo has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture
def groups():
    groups = Groups(0)
    groups.install(lambda call: call())
    yield groups
    groups.uninstall()


def test_a_creation_whose_end_was_interrupted_claims_no_later_sockets(groups, monkeypatch) -> None:
    from torch.distributed import distributed_c10d

    made = []

    def interrupted(_opened) -> None:
        made.extend(pair())
        raise Interrupted("a second time, while the first unwinds")

    monkeypatch.setattr(groups, "_finish_creation", interrupted)
    with pytest.raises(Interrupted):
        distributed_c10d._new_process_group_helper()      # called wrongly: it raises at once, as one that was aborted does
    opened = groups.opened
    groups.retire()
    later = pair()
    groups.abort(opened)
    assert made[1].recv(1) == b"", "what the creation itself opened is shut down"
    later[0].sendall(b"x")
    assert later[1].recv(1) == b"x"
    for end in (*made, *later):
        end.close()
