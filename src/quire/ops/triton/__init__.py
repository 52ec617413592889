"""Triton kernels for NVIDIA GPUs, under the ops' names and signatures (see `ops.reference`)."""

from quire.ops.triton.activation import run as activate
from quire.ops.triton.attention.attention import attention_schedule, most_skew, paged_attention
from quire.ops.triton.attention.latent import latent_queries, latent_values, store_latent
from quire.ops.triton.attention.latent_attention import (
    latent_attention,
    latent_most_skew,
    latent_schedule,
)
from quire.ops.triton.attention.rope_store import qk_norm_rope_store
from quire.ops.triton.collectives.segments import add_pairs, segment_sum
from quire.ops.triton.experts.experts import expert_segments, experts_mlp
from quire.ops.triton.experts.kernels import add_gated
from quire.ops.triton.experts.route import route
from quire.ops.triton.images.pixels import cut_patches, resize_columns, resize_rows
from quire.ops.triton.images.rows import add_rows, replace_rows, section_rotary, span_rows
from quire.ops.triton.images.tower import rotate_heads, segment_attention
from quire.ops.triton.linear import linear
from quire.ops.triton.lora.adapted_gemm import adapted_linear
from quire.ops.triton.lora.adapters import adapter_rows, add_adapters
from quire.ops.triton.norm import layer_norm, rms_norm
from quire.ops.triton.recurrent.gated_delta_net import (
    gated_delta,
    gated_rms_norm,
    short_conv,
    sigmoid_gate,
)
from quire.ops.triton.step.adjust import adjust
from quire.ops.triton.step.decodes import expand_decodes
from quire.ops.triton.step.drafts import begin_drafts, keep_drafts
from quire.ops.triton.step.embedding import embedding
from quire.ops.triton.step.host import mask_logits, set_clock, wait_for_inputs
from quire.ops.triton.step.sampling import sample, token_logprobs
from quire.ops.triton.step.step import (
    collect_rows,
    expand_rows,
    finish_rows,
    place_drafts,
    pool_rows,
    sample_and_finish,
    scatter,
)

__all__ = [
    "activate",
    "adapted_linear",
    "adapter_rows",
    "add_adapters",
    "add_gated",
    "add_pairs",
    "add_rows",
    "adjust",
    "attention_schedule",
    "begin_drafts",
    "collect_rows",
    "cut_patches",
    "embedding",
    "expand_decodes",
    "expand_rows",
    "expert_segments",
    "experts_mlp",
    "finish_rows",
    "gated_delta",
    "gated_rms_norm",
    "keep_drafts",
    "latent_attention",
    "latent_most_skew",
    "latent_queries",
    "latent_schedule",
    "latent_values",
    "layer_norm",
    "linear",
    "mask_logits",
    "most_skew",
    "paged_attention",
    "place_drafts",
    "pool_rows",
    "qk_norm_rope_store",
    "replace_rows",
    "resize_columns",
    "resize_rows",
    "rms_norm",
    "rotate_heads",
    "route",
    "sample",
    "sample_and_finish",
    "scatter",
    "section_rotary",
    "segment_attention",
    "segment_sum",
    "set_clock",
    "short_conv",
    "sigmoid_gate",
    "span_rows",
    "store_latent",
    "token_logprobs",
    "wait_for_inputs",
]
