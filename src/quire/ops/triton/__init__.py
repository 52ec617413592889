"""Triton kernels for NVIDIA GPUs, under the ops' names and signatures (see `ops.reference`)."""

from quire.ops.triton.activation import gelu, silu_and_mul
from quire.ops.triton.attention import attention_schedule, paged_attention
from quire.ops.triton.embedding import embedding
from quire.ops.triton.linear import linear
from quire.ops.triton.mask import mask_logits
from quire.ops.triton.norm import layer_norm, rms_norm
from quire.ops.triton.rope_store import qk_norm_rope_store

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
