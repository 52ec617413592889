"""Ops in plain PyTorch: the CPU backend, and the reference for every kernel's tests."""

from quire.ops.reference.attention import attention_schedule, most_skew, paged_attention
from quire.ops.reference.cache import qk_norm_rope_store
from quire.ops.reference.dense import (
    activate,
    add_rows,
    embedding,
    layer_norm,
    linear,
    replace_rows,
    rms_norm,
    section_rotary,
)
from quire.ops.reference.step import (
    adjust,
    collect_rows,
    copy_blocks,
    expand_decodes,
    expand_rows,
    finish_rows,
    place_drafts,
    sample,
    sample_and_finish,
    scatter,
    token_logprobs,
)

__all__ = [
    "activate", "add_rows", "adjust", "attention_schedule", "collect_rows", "copy_blocks",
    "embedding", "expand_decodes", "expand_rows", "finish_rows", "layer_norm", "linear",
    "most_skew", "paged_attention", "place_drafts", "qk_norm_rope_store", "replace_rows",
    "rms_norm", "sample", "sample_and_finish", "scatter", "section_rotary", "token_logprobs",
]  # fmt: skip
