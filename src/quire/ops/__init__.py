"""Numerical ops: a plain PyTorch twin on every device, kernels where they exist.

T is the number of tokens of a step, R of its rows, Hq and Hkv the heads of this rank, D the head
size, NB the blocks of a KV group and BS the tokens of a block. Ops do not synchronize with the
host, and never use -1, which marks padding, as an index.
"""

from quire.ops import reference
from quire.ops.arguments import Activation, RmsScale, Scratch
from quire.ops.choose import Policy, current_policy, op, use_policy
from quire.ops.kv import AttentionHeads, KVFormat, KVLayer, kv_format
from quire.ops.rows import (
    DecodeInputs,
    Drafts,
    Expanded,
    LogitRows,
    ProcessedLogits,
    ResultRing,
    StepRows,
)
from quire.ops.weight import Weight, WeightFormat

activate = op(reference.activate)
add_rows = op(reference.add_rows)
adjust = op(reference.adjust)
attention_schedule = op(reference.attention_schedule)
collect_rows = op(reference.collect_rows)
copy_blocks = op(reference.copy_blocks)
embedding = op(reference.embedding)
expand_decodes = op(reference.expand_decodes)
expand_rows = op(reference.expand_rows)
finish_rows = op(reference.finish_rows)
layer_norm = op(reference.layer_norm)
linear = op(reference.linear)
most_skew = op(reference.most_skew)
paged_attention = op(reference.paged_attention)
place_drafts = op(reference.place_drafts)
qk_norm_rope_store = op(reference.qk_norm_rope_store)
replace_rows = op(reference.replace_rows)
rms_norm = op(reference.rms_norm)
sample = op(reference.sample)
sample_and_finish = op(reference.sample_and_finish)
scatter = op(reference.scatter)
section_rotary = op(reference.section_rotary)
token_logprobs = op(reference.token_logprobs)

__all__ = [
    "Activation", "AttentionHeads", "DecodeInputs", "Drafts", "Expanded", "KVFormat", "KVLayer",
    "LogitRows", "Policy", "ProcessedLogits", "ResultRing", "RmsScale", "Scratch", "StepRows",
    "Weight", "WeightFormat", "activate", "add_rows", "adjust", "attention_schedule",
    "collect_rows", "copy_blocks", "current_policy", "embedding", "expand_decodes", "expand_rows",
    "finish_rows", "kv_format", "layer_norm", "linear", "most_skew", "op", "paged_attention",
    "place_drafts", "qk_norm_rope_store", "replace_rows", "rms_norm", "sample", "sample_and_finish",
    "scatter", "section_rotary", "token_logprobs", "use_policy",
]  # fmt: skip
