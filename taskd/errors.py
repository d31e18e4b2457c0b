"""The exceptions of taskd. Imports nothing.

A fault of a training process is data (`taskd.core.faults.Fault`), never one of these.
"""


class TaskdError(Exception):
    """Base of every error that taskd raises. Catch it to separate taskd's errors from your own."""


class ConfigError(TaskdError):
    """A configuration value is wrong.

    The text names the key, the value and what is accepted: correct it.
    """


class ProtocolError(TaskdError):
    """A message broke the protocol of docs/protocol.md."""


class LocalProtocolError(ProtocolError):
    """We tried to send something that the protocol forbids: a bug in taskd, please report it."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids.

    Look for an old version or a stranger on the port.

    `reason` is the kind: "size", "malformed", "version", "unknown type" or "foreign".
    """

    def __init__(self, reason: str, text: str, type_code: int | None = None) -> None:
        """`text` says what exactly was wrong; `type_code` is the type that is unknown."""
        super().__init__(f"{reason}: {text}")
        self.reason = reason
        self.type_code = type_code
        self.envelope: object = None  # of the message, if that much of it could be read
        self.message_code: int | None = None


class InvalidTransition(TaskdError):  # noqa: N818
    """A state machine met an event that it has no rule for.

    The text carries the story: please report it.
    """


class NativeLibraryError(TaskdError):
    """libtaskd.so is missing, too old or refused a call. taskd goes on without it, more slowly."""


class UnsupportedTorchError(TaskdError):
    """The installed torch is not the one that the patch knows. torchrun is left alone.

    See docs/compat.md.
    """


class MissingTorchError(TaskdError, ImportError):
    """What was asked for works on torch, and none is installed. The text says what to install."""


class MissingMindSporeError(TaskdError, ImportError):
    """What was asked for works on MindSpore, and none is installed.

    The text says what to install.
    """


class ArenaError(TaskdError):
    """Node memory for snapshots cannot be had, or does not hold what is asked for.

    The text says what is missing and what to do.
    """


class StateError(TaskdError):
    """TrainState was used in a way that cannot work.

    The text says what to change in the training script.
    """


class IncurableError(TaskdError):
    """The processes that are there cannot go on with the training state, although it is whole.

    All are replaced, or the state is saved and the job ends. The text says why: correct that.
    """


class CheckpointError(TaskdError):
    """A checkpoint could not be written, or does not fit what it is to be loaded into.

    The text names the file and what to change.
    """


class CorruptCheckpointError(CheckpointError):
    """The bytes on disk are not those of a complete checkpoint.

    Load an older one, and look for the cause: disk, copy, another program.
    """


class TransportError(TaskdError):
    """A socket could not be opened. The text says which address, and which process to look for."""


class AddressTakenError(TransportError):
    """Another process listens there. The text says how to find it."""


class ForkserverError(TaskdError):
    """The warm parent of workers is gone or refused. The agent starts another one."""


class InternalError(TaskdError):
    """A bug in taskd: please report it with the log and the story file."""


class Interrupted(BaseException):
    """Raised in a training process's main thread to unwind the function under `recoverable`.

    It derives from BaseException so that `except Exception` around a training step does not swallow
    it. Let it pass: the decorator catches it, waits for the recovery and enters the function again.
    """
