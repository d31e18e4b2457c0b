"""The keys of encrypted links, and how a listener tells the speakers apart.

    speaker: draws a key pair, for itself only         listener: has the key pair of the secret
       │── CURVE handshake with that pair ─────────────────►│  ZAP: ties the key to the connection
       │── each message: [voucher and name, data] ─────────►│  the speaker is name and key

Whoever holds the secret can make a voucher, and only for a key that he has: he speaks under any
name, but never as another one who has that name. ZeroMQ tells a ZAP handler no more of a client
than its public key, so the voucher travels with the messages. Beside `zeromq` the only module that
imports zmq; knows nothing of messages.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

_KEY_BYTES = 32
_MAX_NAME_BYTES = 1024  # a relay's is that of its client and a key
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_ZAP_DOMAIN = b"taskd"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """In the text form that ZeroMQ takes. The private half is never shown, sent or stored."""

    public: bytes
    private: bytes = field(repr=False)


def draw() -> KeyPair:
    """A new one, as each process that speaks has it from its start to its end."""
    return KeyPair(*zmq.curve_keypair())


def relayed(secret: bytes, client: bytes) -> KeyPair:
    """That of a relay for one of its clients: the same after a restart of the relay."""
    return _pair(hashlib.blake2b(client, digest_size=_KEY_BYTES, key=_derive(secret, b"relay")))


def _listener(secret: bytes) -> KeyPair:
    return _pair(_hash(secret, b"server"))


def _common_key(secret: bytes) -> KeyPair:
    """What all speakers of earlier versions have in common."""
    return _pair(_hash(secret, b"client"))


def _pair(private: "hashlib.blake2b") -> KeyPair:
    text = z85.encode(private.digest())
    return KeyPair(zmq.curve_public(text), text)


def _hash(secret: bytes, purpose: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(secret, digest_size=_KEY_BYTES, person=b"taskd " + purpose)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return _hash(secret, purpose).digest()


def _voucher(key: bytes, name: bytes, public: bytes) -> bytes:
    return hashlib.blake2b(public + name, digest_size=_KEY_BYTES, key=key).digest()


def speak(socket: "zmq.Socket[bytes]", secret: bytes, name: bytes, pair: KeyPair) -> bytes:
    """Prepare a socket that will connect. Returns what it has to send before each message."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, _listener(secret).public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.private)
    return _voucher(_derive(secret, b"voucher"), name, z85.decode(pair.public)) + name


class Admission:
    """The listener's side. `socket` is to be served whenever it is readable."""

    def __init__(self, secret: bytes, listener: "zmq.Socket[bytes]") -> None:
        """For one `listener` in a context. Raises `zmq.ZMQError`: the context has one already."""
        self._key = _derive(secret, b"voucher")
        self._outdated = z85.decode(_common_key(secret).public)
        self.socket: zmq.Socket[bytes] = listener.context.socket(zmq.REP)
        try:
            self.socket.bind(_ZAP_ADDRESS)
        except zmq.ZMQError:
            self.socket.close(linger=0)
            raise
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, _listener(secret).private)
        listener.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def serve(self) -> None:
        """Let in whoever knows the listener's key, which comes from the secret, and note his own.

        Not the common key of earlier versions: nobody could tell who speaks with it.
        """
        while self.socket.poll(0):
            version, request_id, *_, mechanism, key = self.socket.recv_multipart()
            is_let_in = mechanism == b"CURVE" and key != self._outdated
            answer = (b"200", b"OK", key.hex().encode()) if is_let_in else (b"400", b"no", b"")
            self.socket.send_multipart([version, request_id, *answer, b""])

    def speaker(self, header: zmq.Frame) -> bytes | None:
        """Who sends the message that begins so: "name.key"; None: nobody vouches for his key."""
        said = header.bytes
        voucher, name = said[:_KEY_BYTES], said[_KEY_BYTES:]
        try:
            public = str(header.get("User-Id"))
        except zmq.ZMQError:
            return None
        if len(name) > _MAX_NAME_BYTES or not hmac.compare_digest(
            voucher, _voucher(self._key, name, bytes.fromhex(public))
        ):
            return None
        return name + b"." + public.encode()
