"""Numerical ops: a plain PyTorch twin on every device, kernels where they exist.

T is the number of tokens of a step, R of its rows, Hq and Hkv the heads of this rank, D the head
size, NB the blocks of a KV group and BS the tokens of a block. Ops do not synchronize with the
host, and never use -1, which marks padding, as an index.
"""

from quire.ops import reference
from quire.ops.arguments import Activation, RmsScale, Scratch
from quire.ops.choose import Policy, current_policy, op, use_policy
from quire.ops.kv import KVFormat, KVLayer, kv_format

attention_schedule = op(reference.attention_schedule)
embedding = op(reference.embedding)
gelu = op(reference.gelu)
layer_norm = op(reference.layer_norm)
linear = op(reference.linear)
mask_logits = op(reference.mask_logits)
paged_attention = op(reference.paged_attention)
qk_norm_rope_store = op(reference.qk_norm_rope_store)
rms_norm = op(reference.rms_norm)
silu_and_mul = op(reference.silu_and_mul)

__all__ = [
    "Activation",
    "KVFormat",
    "KVLayer",
    "Policy",
    "RmsScale",
    "Scratch",
    "attention_schedule",
    "current_policy",
    "embedding",
    "gelu",
    "kv_format",
    "layer_norm",
    "linear",
    "mask_logits",
    "op",
    "paged_attention",
    "qk_norm_rope_store",
    "rms_norm",
    "silu_and_mul",
    "use_policy",
]
