"""What only sockets have: taken ports, strangers, secrets, limits."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

import pytest
import zmq

from taskd.errors import TransportError
from taskd.transport import base, curve, zeromq
from taskd.transport.silence import Silence
from tests.contract.test_links import SECRET, await_messages, by_name
from tests.descriptors import none_free


@pytest.fixture
def router():
    made = zeromq.Router("127.0.0.1:0")
    yield made
    made.close()


def await_refusals(router: zeromq.Router, limit_s: float = 10.0) -> list[str]:
    deadline = time.monotonic() + limit_s
    while True:
        router.poll(0.05)
        heard = router.receive()
        refused = router.take_refused()
        if refused:
            assert heard == []
            return refused
        assert time.monotonic() < deadline, "nobody was refused"


def test_a_taken_port_says_which_process_to_look_for(router: zeromq.Router) -> None:
    port = router.address.rpartition(":")[2]
    with pytest.raises(TransportError) as caught:
        zeromq.Router(router.address)
    assert f"127.0.0.1:{port} is taken" in str(caught.value)
    assert f"ss -ltnp 'sport = :{port}'" in str(caught.value)


@pytest.mark.parametrize("address", ["192.0.2.1:9601", "no.such.host:9601"])
def test_an_address_that_cannot_be_bound_is_named(address: str) -> None:
    with pytest.raises(TransportError, match=address.partition(":")[0]):
        zeromq.Router(address)


def test_the_name_of_this_host_can_be_bound() -> None:
    router = zeromq.Router("localhost:0")
    assert router.address.startswith("127.0.0.1:")
    router.close()


def test_an_address_that_makes_no_sense_cannot_be_connected_to() -> None:
    with pytest.raises(TransportError, match="host:port"):
        zeromq.Dealer("nonsense", "a")


@pytest.mark.parametrize(
    ("greeting", "is_counted"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", True),
        (b"\xff" * 100, True),
        (b"\xff" + bytes(9), False),
        (bytes(64), False),
    ],
    ids=["http", "ones", "cut", "zeros"],
)
def test_strangers_do_no_harm_and_are_counted_if_they_got_as_far_as_a_handshake(
    router, greeting, is_counted
) -> None:
    with socket.create_connection(
        ("127.0.0.1", int(router.address.rpartition(":")[2]))
    ) as stranger:
        stranger.sendall(greeting)
    if is_counted:
        assert await_refusals(router)
    dealer = zeromq.Dealer(router.address, "a")
    dealer.send(None, b"x")
    assert (b"a", b"x") in await_messages(router, 1)
    dealer.close()


def test_a_peer_that_goes_is_noticed(router: zeromq.Router) -> None:
    dealer = zeromq.Dealer(router.address, "a")
    dealer.send(None, b"x")
    await_messages(router, 1)
    other = zeromq.Dealer(router.address, "b")
    other.send(None, b"x")
    await_messages(router, 1)
    with socket.create_connection(("127.0.0.1", int(router.address.rpartition(":")[2]))):
        pass  # a stranger, a probe: nobody's connection ends with it
    assert router.take_disconnected() == set()
    dealer.close()
    deadline, gone = time.monotonic() + 10, set()
    while not gone:
        assert time.monotonic() < deadline
        router.poll(0.05)
        gone = router.take_disconnected()
    assert gone == {b"a"}
    other.close()
    assert router.send(b"a", b"y") is False


def test_a_peer_that_comes_back_under_its_name_takes_its_place(router: zeromq.Router) -> None:
    for words in (b"1", b"2", b"3"):
        dealer = zeromq.Dealer(router.address, "a")
        dealer.send(None, words)
        assert await_messages(router, 1) == [(b"a", words)]
        assert router.send(b"a", b"answer to " + words)
        assert await_messages(dealer, 1) == [(b"", b"answer to " + words)]
        dealer.close()  # the router may not have noticed when the next one comes


def test_what_was_on_the_way_to_a_peer_that_speaks_on_another_connection_is_in_doubt(
    router: zeromq.Router,
) -> None:
    """The first one hangs in the network: nobody is told of its end."""
    dealers = []
    for _ in range(2):
        assert router.take_disconnected() == set()
        dealers.append(zeromq.Dealer(router.address, "a"))
        dealers[-1].send(None, b"x")
        assert await_messages(router, 1) == [(b"a", b"x")]
    assert router.take_disconnected() == {b"a"}
    for dealer in dealers:
        dealer.close()


def test_what_is_read_of_a_connection_after_its_peer_has_another_one_is_nobodys(
    router: zeromq.Router, monkeypatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(router, "_ended", ended.append)
    former = zeromq.Dealer(router.address, "a")
    for words in (b"1", b"2"):
        former.send(None, words)
    assert router._socket.poll(10_000), "the name of the first is known, and nothing is read"
    former._linger_ms = 10_000
    former.close()
    deadline = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < deadline
        router.poll(0.05)
    present = zeromq.Dealer(router.address, "a")
    while not present.receive():  # it has the name when it gets what is said to that
        assert time.monotonic() < deadline
        router.send(b"a", b"y")
        present.poll(0.02)
    present.send(None, b"3")
    heard = await_messages(router, 3)
    assert [(words, peer.startswith(base.NAMELESS)) for peer, words in heard] == [
        (b"1", False),
        (b"2", True),
        (b"3", False),
    ]
    present.close()


def test_a_monstrous_frame_costs_its_sender_the_connection(router: zeromq.Router) -> None:
    big, small = zeromq.Dealer(router.address, "big"), zeromq.Dealer(router.address, "small")
    big.send(None, bytes(8 * base.MAX_FRAME_BYTES))
    small.send(None, b"x")
    assert await_messages(router, 1) == [(b"small", b"x")]
    big.close()
    small.close()


@pytest.mark.parametrize("theirs", [b"fedcba9876543210", None])
def test_without_the_secret_nobody_gets_in(theirs: bytes | None) -> None:
    router = zeromq.Router("127.0.0.1:0", secret=SECRET)
    stranger = zeromq.Dealer(router.address, "stranger", secret=theirs)
    stranger.send(None, b"x")
    assert await_refusals(router)
    assert router.receive() == []
    friend = zeromq.Dealer(router.address, "friend", secret=SECRET)
    friend.send(None, b"y")
    assert by_name(await_messages(router, 1)) == [(b"friend", b"y")]
    for link in (stranger, friend, router):
        link.close()


def test_a_dealer_tells_whether_anybody_listens() -> None:
    router = zeromq.Router("127.0.0.1:0")
    address = router.address
    there = zeromq.Dealer(address, "a", watches=True)
    assert there.attempts.reaches(60.0)
    there.close()
    router.close()
    away = zeromq.Dealer(address, "a", watches=True)
    began = time.monotonic()
    assert not away.attempts.reaches(60.0)
    assert time.monotonic() - began < 60.0, "refused at once"
    away.close()


def knows_the_listener(router: zeromq.Router, pair: curve.KeyPair) -> zeromq.Dealer:
    """Somebody who has the listener's public key, but not the secret, and this key pair."""
    stranger = zeromq.Dealer.__new__(zeromq.Dealer)
    zeromq._Socket.__init__(stranger, zeromq.zmq.DEALER, router.address, 5.0, None)
    stranger._header, stranger._linger_ms = [], 0
    for option, value in (
        (zeromq.zmq.CURVE_SERVERKEY, curve._listener(SECRET).public),
        (zeromq.zmq.CURVE_PUBLICKEY, pair.public),
        (zeromq.zmq.CURVE_SECRETKEY, pair.private),
    ):
        stranger._socket.setsockopt(option, value)
    stranger._socket.connect(f"tcp://{router.address}")
    return stranger


@pytest.fixture
def secured():
    made = zeromq.Router("127.0.0.1:0", secret=SECRET)
    yield made
    made.close()


def test_a_key_for_which_nobody_vouches_says_nothing_that_is_heard(secured) -> None:
    """Encryption alone must not be enough."""
    pair, other = curve.draw(), curve.draw()
    stranger = knows_the_listener(secured, pair)
    friend = zeromq.Dealer(secured.address, "friend", secret=SECRET, key=other)
    (theirs,) = friend._header
    for frames in (
        [b"x"],
        [b"", b"x"],
        [bytes(32) + b"friend", b"x"],
        [theirs, b"x"],  # of another key
        [bytes(5000), b"x"],
        [b"header", b"x", b"more"],
    ):
        stranger._send(frames)
    refused: list[str] = []
    while len(refused) < 6:
        refused += await_refusals(secured)
    assert set(refused) == {"a key for which nobody with the secret vouches"}
    friend.send(None, b"y")
    assert by_name(await_messages(secured, 1)) == [(b"friend", b"y")]
    stranger.close()
    friend.close()


def test_a_voucher_is_of_one_name(secured) -> None:
    pair = curve.draw()
    speaker = zeromq.Dealer(secured.address, "agent-1", secret=SECRET, key=pair)
    speaker._header[0] = speaker._header[0].replace(b"agent-1", b"agent-0")
    speaker.send(None, b"x")
    assert await_refusals(secured) == ["a key for which nobody with the secret vouches"]
    speaker.close()


def test_two_with_one_name_are_two_and_each_is_answered(secured) -> None:
    """Neither takes the connection of the other, as with a routing id."""
    first, second = (zeromq.Dealer(secured.address, "agent-0", secret=SECRET) for _ in range(2))
    for dealer, words in ((first, b"first"), (second, b"second"), (first, b"first")):
        dealer.send(None, words)
        ((peer, said),) = await_messages(secured, 1)
        assert said == words
        assert secured.send(peer, b"to " + words)
        assert await_messages(dealer, 1, (secured,)) == [(b"", b"to " + words)]
    assert secured.take_disconnected() == set()
    first.close()
    second.close()


def test_one_key_has_one_name_on_all_its_connections(secured) -> None:
    """It comes back before anybody has noticed that it was away."""
    pair, peers = curve.draw(), set()
    for _ in range(3):
        dealer = zeromq.Dealer(secured.address, "a", secret=SECRET, key=pair)
        dealer.send(None, b"x")
        ((peer, _),) = await_messages(secured, 1)
        assert secured.send(peer, b"answer")
        assert await_messages(dealer, 1, (secured,)) == [(b"", b"answer")]
        peers.add(peer)
        dealer.close()
    assert len(peers) == 1
    assert secured.take_disconnected() == peers


def test_the_common_key_of_an_earlier_version_is_refused_and_the_reason_says_so(secured) -> None:
    outdated = knows_the_listener(secured, curve._common_key(SECRET))
    outdated._send([b"x"])
    assert await_refusals(secured)[0].startswith("an earlier version of taskd")
    assert secured.receive() == []
    outdated.close()


def test_a_key_pair_shows_its_public_half_only() -> None:
    pair = curve.draw()
    assert pair.public.decode() in repr(pair)
    assert pair.private.decode() not in repr(pair)


def test_an_address_that_others_reach_is_warned_of_unless_there_is_a_secret(caplog) -> None:
    logging.getLogger("taskd").propagate = True
    for secret, warnings in ((None, 1), (SECRET, 0)):
        caplog.clear()
        router = zeromq.Router("0.0.0.0:0", secret=secret)
        router.close()
        assert (
            len([record for record in caplog.records if "TASKD_SECRET_FILE" in record.message])
            == warnings
        )


def test_closing_does_not_wait_for_a_manager_that_never_was(monkeypatch) -> None:
    monkeypatch.setattr(zeromq, "_LINGER_MS", 60_000)
    dealer = zeromq.Dealer("127.0.0.1:1", "a")
    for _ in range(10):
        assert dealer.send(None, b"x")
    began = time.monotonic()
    dealer.close()
    assert time.monotonic() - began < 50


class LaterTime:
    """Stands in for the module `time`: its clock can be put forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def passes(self, seconds: float) -> None:
        self._ahead_s += seconds


def test_a_connection_on_which_nobody_speaks_is_closed_and_those_who_have_spoken_stay(
    monkeypatch,
) -> None:
    router = zeromq.Router("127.0.0.1:0", silent_s=60.0)
    speaker, silent = zeromq.Dealer(router.address, "speaker"), zeromq.Dealer(router.address, "x")
    speaker.send(None, b"x")
    await_messages(router, 1)
    clock = LaterTime()
    monkeypatch.setattr(zeromq, "time", clock)
    refused, deadline = [], time.monotonic() + 30
    while not refused:  # until `silent` has been accepted, and its time has passed
        assert time.monotonic() < deadline, "nobody was refused"
        router.poll(0.05)
        clock.passes(60.0)
        assert router.receive() == []
        refused = router.take_refused()
    assert refused == ["nobody has said anything there"]
    assert router.send(b"speaker", b"y")
    assert await_messages(speaker, 1, (router,)) == [(b"", b"y")]
    assert router.take_disconnected() == set()
    silent.close()
    speaker.close()
    router.close()


def test_who_spoke_before_it_was_told_that_the_connection_is_there_stays(monkeypatch) -> None:
    """ZeroMQ has a thread that accepts connections, and another that reads from them."""
    router = zeromq.Router("127.0.0.1:0", silent_s=60.0)
    speaker = zeromq.Dealer(router.address, "speaker")
    speaker.send(None, b"x")
    deadline = time.monotonic() + 30
    while not router.receive():  # without a look at the events
        assert time.monotonic() < deadline, "nothing came"
        select.select([], [], [], 0.01)
    clock = LaterTime()
    monkeypatch.setattr(zeromq, "time", clock)
    router.poll(0.05)
    clock.passes(60.0)
    assert router.receive() == []
    assert router.take_refused() == []
    assert router.send(b"speaker", b"y")
    assert await_messages(speaker, 1, (router,)) == [(b"", b"y")]
    speaker.close()
    router.close()


def test_whoever_gets_the_number_of_a_connection_whose_last_words_came_late_must_speak(
    monkeypatch,
) -> None:
    """Its end may be told before what was said there is read."""
    router = zeromq.Router("127.0.0.1:0", silent_s=60.0)
    speaker = zeromq.Dealer(router.address, "speaker")
    told, read = [], router._monitor.read
    monkeypatch.setattr(router._monitor, "read", lambda: [told.append(it) or it for it in read()])
    speaker.send(None, b"x")
    await_messages(router, 1)
    speaker.send(None, b"y")
    speaker.close()
    address = ("127.0.0.1", int(router.address.rpartition(":")[2]))
    deadline = time.monotonic() + 30
    with contextlib.ExitStack() as stack:

        def connect() -> None:
            """And wait for the greeting, as it has been accepted then."""
            stack.enter_context(socket.create_connection(address, timeout=30)).recv(1)

        while not any(event == zmq.Event.DISCONNECTED for event, _ in told):
            assert time.monotonic() < deadline, "the end was not told"
            router.poll(0.01)
        number = dict(told)[zmq.Event.DISCONNECTED]
        while os.path.exists(f"/proc/self/fd/{number}"):
            assert time.monotonic() < deadline, "ZeroMQ has not closed it"
            select.select([], [], [], 0.001)
        assert router.take_disconnected() == {b"speaker"}
        assert router.receive() == [(b"speaker", b"y")]
        assert router.take_disconnected() == {b"speaker"}  # as if it were its first word
        told.clear()
        while (zmq.Event.ACCEPTED, number) not in told:
            assert time.monotonic() < deadline, "nobody got the number"
            connect()
            router.poll(0.05)
        clock = LaterTime()
        monkeypatch.setattr(zeromq, "time", clock)
        clock.passes(60.0)
        assert router.receive() == []
        assert router.take_refused() == ["nobody has said anything there"] * len(told)
    router.close()


def test_only_connections_of_its_own_port_are_closed(tmp_path) -> None:
    """A descriptor that ends becomes another file's."""
    silence = Silence(1.0)
    ours, theirs = socket.socketpair()
    with open(tmp_path / "file", "w") as file, ours, theirs:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            client = socket.create_connection(("127.0.0.1", port))
            accepted = listener.accept()[0]
        reader, writer = os.pipe()
        os.close(reader)
        os.close(writer)
        for descriptor in (
            file.fileno(),
            ours.fileno(),
            client.fileno(),
            writer,
            accepted.fileno(),
        ):
            silence.opened(descriptor, 0.0)
        assert silence.due_at == 1.0
        assert silence.hang_up(0.9, port) == 0
        assert silence.hang_up(1.0, port) == 5
        assert silence.due_at is None
        assert os.fstat(client.fileno()) and os.fstat(accepted.fileno())  # ZeroMQ closes its own
        file.write("x")
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        assert client.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            accepted.send(b"x")
        client.close()
        accepted.close()


def test_a_router_whose_events_nobody_reads_goes_on_and_ends() -> None:
    """So many agents may leave at once while the manager is busy, or ends."""
    router = zeromq.Router("127.0.0.1:0", silent_s=60.0)
    port = int(router.address.rpartition(":")[2])
    for _ in range(1500):  # ZeroMQ's own bound is 2,000 events, two of which come of each
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.recv(1)  # the greeting: it has been accepted
    agent = zeromq.Dealer(router.address, "agent", beside=None)
    agent.send(None, b"here")
    deadline = time.monotonic() + 30
    while not router.receive():
        assert time.monotonic() < deadline, "nothing is received any more"
        select.select([], [], [], 0.01)  # without a look at the events
    closing = threading.Thread(target=router.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "it waits for room for one more event"
    agent.close()


def test_without_enough_descriptors_there_is_an_error_and_the_process_lives(
    router: zeromq.Router,
) -> None:
    """ZeroMQ ends it by `abort` if it gets some of those that it wants."""
    for free in range(8):
        with none_free(but=free), pytest.raises(TransportError, match="no socket can be opened"):
            zeromq.Router("127.0.0.1:0")
    with none_free(), pytest.raises(TransportError, match="Too many open files"):
        zeromq.Dealer(router.address, "agent", beside=router)
