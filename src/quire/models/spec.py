"""An architecture as data: everything the one decoder needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from quire.layers.linear import Activation
from quire.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """qk_norm: heads of q and k go through an RMSNorm. windows: per layer, how many positions a
    token sees, itself included; None: all of them."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    width: int
    act: Activation
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    family: the module of `quire.models.families` that knows its checkpoints.
    learned_positions: rows of a learned position table, None where positions are rotary.
    tied_head: logits come from the token embeddings.
    dtype: what the checkpoint is stored in. max_positions: the longest sequence it was made for.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MlpSpec
    rope: RopeSpec | None
    learned_positions: int | None
    tied_head: bool
    dtype: torch.dtype
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
