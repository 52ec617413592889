"""Plain PyTorch ops: the CPU backend, and what every kernel is tested against."""

from quire.ops.reference.attention import attention_schedule, paged_attention
from quire.ops.reference.cache import qk_norm_rope_store
from quire.ops.reference.dense import (
    embedding,
    gelu,
    layer_norm,
    linear,
    mask_logits,
    rms_norm,
    silu_and_mul,
)

__all__ = [
    "attention_schedule",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "mask_logits",
    "paged_attention",
    "qk_norm_rope_store",
    "rms_norm",
    "silu_and_mul",
]
