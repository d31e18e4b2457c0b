"""Gradient scalers: read without asking the device, and put back as if no step had begun."""

from typing import Any

import torch


def read_scaler(scaler: Any) -> dict[str, Any]:
    """Its state without asking the device: the two tensors are cloned where they are."""
    scale = getattr(scaler, "_scale", None)
    tracker = getattr(scaler, "_growth_tracker", None)
    if not isinstance(scale, torch.Tensor) or not isinstance(tracker, torch.Tensor):
        return {"state": scaler.state_dict()}
    return {
        "scale": scale.clone(),
        "tracker": tracker.clone(),
        "factors": {
            key: getattr(scaler, f"_{key}")
            for key in ("growth_factor", "backoff_factor", "growth_interval")
            if hasattr(scaler, f"_{key}")
        },
    }


def write_scaler(scaler: Any, remembered: dict[str, Any]) -> None:
    """Put back what `read_scaler` gave."""
    if "state" in remembered:
        load_scaler(scaler, remembered["state"])
        return
    state = {
        "scale": remembered["scale"].item(),
        "_growth_tracker": remembered["tracker"].item(),
        **remembered["factors"],
    }
    load_scaler(scaler, state)


def load_scaler(scaler: Any, state: dict[str, Any]) -> None:
    """`load_state_dict` and a fresh view of its optimizers.

    An interrupted step leaves "already unscaled" behind.
    """
    if state:
        scaler.load_state_dict(state)
    per_optimizer = getattr(scaler, "_per_optimizer_states", None)
    if per_optimizer is not None:
        per_optimizer.clear()
