"""The ops by name. Each says what it computes; `choose` says by which code.

T is the number of tokens of a step, R of its rows, Hq and Hkv the heads of this rank, D the head
size, NB the blocks of a KV group and BS the tokens of a block. Ops do not synchronize with the
host, and never use -1, which marks padding, as an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from quire.ops.choose import choose
from quire.ops.kv import KVFormat, KVLayer

Activation = Literal["silu_and_mul", "gelu", "gelu_tanh"]

RmsScale = tuple[Tensor, float]
"""The weight [width] and the epsilon of an RMSNorm."""

Scratch = dict[Any, Any]
"""What an implementation derives from a step's metadata (gather indices, masks), kept for the
further layers of the step. It must live no longer than the tensors that it was derived from; only
the dict under the key "workspace", memory to use again, may serve all steps of a stream."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang & Sennrich 2019).

    The normalized value is rounded to x's dtype before the weight, as models were trained.
    """
    return choose("rms_norm", x.device)(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016)."""
    return choose("layer_norm", x.device)(x, weight, bias, eps)  # type: ignore[no-any-return]


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [T, 2 * width] = [gate | up] -> [T, width] (Shazeer 2020)."""
    return choose("silu_and_mul", x.device)(x)  # type: ignore[no-any-return]


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU, exact ("none") or by tanh ("tanh") (Hendrycks & Gimpel 2016)."""
    return choose("gelu", x.device)(x, approximate)  # type: ignore[no-any-return]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RmsScale | None = None,
    act: Activation | None = None,
) -> Tensor:
    """act(norm(x) [T, in] @ weight [out, in]ᵀ + bias [out]) + residual [T, out].

    norm: (weight, eps) of an RMSNorm of x. act: "silu_and_mul", which halves the width (see there);
    "gelu", exact, or "gelu_tanh". The result may take the residual's place in memory.
    """
    return choose("linear", x.device)(  # type: ignore[no-any-return]
        x, weight, bias, residual, norm, act
    )


def mask_logits(logits: Tensor, mask: Tensor, lines: Tensor | None = None) -> Tensor:
    """logits [n, vocab], dense rows, changed in place: -inf where a bit of mask, int32 [m, at least
    vocab / 32], is clear; bit i of word w is token 32 w + i. lines: int32 [n], the line of the mask
    that each row is under, or -1 for none; left out, each is under its own."""
    return choose("mask_logits", logits.device)(logits, mask, lines)  # type: ignore[no-any-return]


def embedding(ids: Tensor, table: Tensor, start: int = 0) -> Tensor:
    """Rows of `table` [rows, width] for int ids [T] -> [T, width]. The table holds ids from `start`
    on; ids outside of it, -1 among them, give zeros."""
    return choose("embedding", table.device)(ids, table, start)  # type: ignore[no-any-return]


def qk_norm_rope_store(
    qkv: Tensor,
    kv: KVLayer,
    *,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    scratch: Scratch | None = None,
) -> Tensor:
    """Norms the heads of q and k, rotates them, and stores k and v in the paged cache.

    qkv: [T, Hq + 2 * Hkv, D], the fused projection. kv: where k and v go, rounded to 8 bits if
        that is how they are stored. slots: int [T], where each token goes (block * BS + offset),
        -1: nowhere.
    cos_sin: float32 [positions, rotary], cosines then sines, of the first `rotary` dimensions of a
        head, which turn in pairs (i, i + rotary / 2) (Su et al. 2021); None: no rotation.
    q_weight, k_weight: [D] RMSNorm weights over a head, applied before the rotation, or None.
    Returns q [T, Hq, D].
    """
    return choose("qk_norm_rope_store", qkv.device)(  # type: ignore[no-any-return]
        qkv,
        kv,
        positions=positions,
        slots=slots,
        cos_sin=cos_sin,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        scratch=scratch,
    )


def attention_schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    tokens: int,
    max_q_len: int,
    window: int | None = None,
) -> Any:
    """How the work of `paged_attention` on a step's rows is shared out, for all layers with these
    shapes and this window: goes into its `scratch` under "schedule". See there for the arguments;
    heads, kv_heads: of this rank; dtype: of the queries; tokens: places for them."""
    return choose("attention_schedule", seq_lens.device)(
        query_start,
        seq_lens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        kv_format=kv_format,
        tokens=tokens,
        max_q_len=max_q_len,
        window=window,
    )


def paged_attention(
    q: Tensor,
    kv: KVLayer,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    q_lens: Sequence[int],
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Causal attention of each row's last tokens over the row's cached context.

    q: [T, Hq, D]; row r's tokens start at query_start[r] and are the last q_lens[r] of its
        seq_lens[r] positions, whose k and v are in the cache already.
    kv: what is stored; all values finite, written or not.
    block_table: int32 [R, max_blocks]. q_lens, max_q_len, max_seq_len: host-known lengths of the
        rows and upper bounds.
    window: a token sees itself and the window - 1 before it (Beltagy et al. 2020).
    softcap: scores become softcap * tanh(score / softcap) (Gemma Team 2024).
    Returns [T, Hq, D]; undefined for padding tokens.
    """
    return choose("paged_attention", q.device)(  # type: ignore[no-any-return]
        q,
        kv,
        query_start,
        seq_lens,
        block_table,
        q_lens=q_lens,
        max_q_len=max_q_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        softcap=softcap,
        scratch=scratch,
    )
