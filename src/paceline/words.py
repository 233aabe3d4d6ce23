"""Numbers in words."""

from __future__ import annotations

from collections.abc import Mapping


def ranks_text(count: int) -> str:
    """Such as "1 rank" or "4 ranks"."""
    return "1 rank" if count == 1 else f"{count} ranks"


def outcome_text(step: int, metrics: Mapping[str, float], weights_sha256: str) -> str:
    """How a run has ended, such as "step 230  val_loss 0.0339  accuracy 0.9944  weights 129331c41e82"."""
    measured = [f"{name} {value:.4f}" for name, value in metrics.items()]
    return "  ".join([f"step {step}", *measured, f"weights {weights_sha256[:12]}"])
