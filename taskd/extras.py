"""torch is not required: a manager, or a job of another framework, does without.

What cannot asks here first.
"""

from importlib.util import find_spec

from taskd.errors import MissingMindSporeError, MissingTorchError


def require_torch() -> None:
    """Raise `MissingTorchError` if torch is not installed. Does not import it."""
    if find_spec("torch") is None:
        raise MissingTorchError(
            "taskd needs torch here: pip install torch, or taskd[torch]", name="torch"
        )


def require_mindspore() -> None:
    """Raise `MissingMindSporeError` if MindSpore is not installed. Does not import it."""
    if find_spec("mindspore") is None:
        raise MissingMindSporeError(
            'taskd.mindspore needs MindSpore: pip install mindspore "numpy<2"', name="mindspore"
        )
