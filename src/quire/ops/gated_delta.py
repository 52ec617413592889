"""The ops of gated delta layers, which few models have."""

from quire.ops.choose import op
from quire.ops.reference import gated_delta as reference
from quire.ops.state import StateLayer, StateRows

gated_delta = op(reference.gated_delta)
gated_rms_norm = op(reference.gated_rms_norm)
short_conv = op(reference.short_conv)
sigmoid_gate = op(reference.sigmoid_gate)

__all__ = [
    "StateLayer", "StateRows", "gated_delta", "gated_rms_norm", "short_conv", "sigmoid_gate",
]  # fmt: skip
