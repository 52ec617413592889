"""An architecture as data: everything the one decoder needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from quire.layers.attention import AttentionSpec
from quire.layers.build import Build
from quire.layers.norm import NormSpec
from quire.layers.rotary import RotaryTable


class MixerSpec(Protocol):
    """A layer that mixes tokens, as data. Each kind lies beside its layer."""

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Any:
        """Returns the layer, a module that is called as `Attention` is, and has `workspace_bytes`
        and a `layout` (`layers/layout.py`)."""
        ...


class FfnSpec(Protocol):
    """A layer that treats each token alone, as data. Each kind lies beside its layer."""

    def layer(self, hidden: int, build: Build) -> Any:
        """Returns the layer, a module. It takes the residual stream, the norm before the layer
        and the batch, returns the stream after it, and has `workspace_bytes`, as `Mlp` has."""
        ...


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)).

    norms: whether those are norms of what each part takes, of what it gives, or both.
    parallel: the ffn takes what the mixer takes. multiplier: of what either part gives.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norms: Literal["input", "output", "both"] = "input"
    parallel: bool = False
    multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    family: the module of `quire.models.families` that knows its checkpoints.
    learned_positions: rows of a learned position table, None where positions are rotary.
    tied_head: logits come from the token embeddings.
    dtype: what the checkpoint is stored in. max_positions: the longest sequence it was made for.
    embedding_scale: multiplies token embeddings, rounded to the model's dtype.
    logit_scale: multiplies logits. logit_softcap: logits become softcap * tanh(logit / softcap).
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    learned_positions: int | None
    tied_head: bool
    dtype: torch.dtype
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The mixers that keep keys and values, in the order of their layers."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    def mixer(self, layer: LayerSpec) -> MixerSpec:
        """Returns a layer's mixer, without a window that no sequence can exceed."""
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return mixer
        return replace(mixer, window=self.window(mixer))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The different sizes of attention heads."""
        return tuple(dict.fromkeys(mixer.head_dim for mixer in self.attention))

    def window(self, mixer: AttentionSpec) -> int | None:
        """Returns a mixer's window; one that no sequence can exceed is none at all."""
        window = mixer.window
        return None if window is None or window >= self.max_positions else window
