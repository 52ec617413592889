"""One function per numerical op: a plain PyTorch twin on every device, kernels where they exist."""

from quire.ops.choose import Policy, use_policy
from quire.ops.dispatch import (
    Activation,
    RmsScale,
    Scratch,
    attention_schedule,
    embedding,
    gelu,
    layer_norm,
    linear,
    mask_logits,
    paged_attention,
    qk_norm_rope_store,
    rms_norm,
    silu_and_mul,
)
from quire.ops.kv import KVFormat, KVLayer, kv_format

__all__ = [
    "Activation",
    "KVFormat",
    "KVLayer",
    "Policy",
    "RmsScale",
    "Scratch",
    "attention_schedule",
    "embedding",
    "gelu",
    "kv_format",
    "layer_norm",
    "linear",
    "mask_logits",
    "paged_attention",
    "qk_norm_rope_store",
    "rms_norm",
    "silu_and_mul",
    "use_policy",
]
