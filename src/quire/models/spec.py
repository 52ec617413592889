"""An architecture as data: all that the decoder must know of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from quire.layers.attention import AttentionSpec
from quire.layers.build import Build
from quire.layers.norm import NormSpec
from quire.layers.rotary import RotaryTable


class MixerSpec(Protocol):
    """Describes a layer that mixes tokens, such as attention. Its module is in the same file."""

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Any:
        """Returns the layer, a module with the interface of `Attention`: `forward`,
        `workspace_bytes` and `layout` (`layers/layout.py`).

        Args:
            hidden: numbers in a hidden state.
            rotary: the table for the spec's `rope`, or None.
            build: see `Build`.
        """
        ...


class FfnSpec(Protocol):
    """Describes a layer that computes each token by itself. Its module is in the same file."""

    def layer(self, hidden: int, build: Build) -> Any:
        """Returns the layer, a module with the interface of `Mlp`.

        `forward` takes the residual stream, the norm before the layer and the batch. It returns
        the new stream. `workspace_bytes` bounds its intermediates.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)).

    Attributes:
        mixer: mixes tokens.
        ffn: computes each token by itself.
        norms: whether each part has a norm on its input (pre-norm), its output or both. "sum": on
            the sum of the residual stream and the part's output (post-norm).
        mixer_norm: whether the mixer has its norms.
        parallel: whether the ffn gets the same input as the mixer. Both outputs are added to x.
        multiplier: factor of each part's output before the addition to x.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norms: Literal["input", "output", "both", "sum"] = "input"
    parallel: bool = False
    multiplier: float = 1.0
    mixer_norm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: the module of `quire.models.families` for its checkpoints.
        architecture: the class named in config.json.
        vocab_size: token ids.
        hidden_size: numbers in a hidden state.
        norm: kind of the norms between layers' parts and before the head.
        layers: the layers, in order.
        learned_positions: rows of the learned position table, or None without one.
        tied_head: whether the head uses the token embeddings as weights.
        dtype: dtype of the checkpoint.
        max_positions: tokens of the longest sequence that the model supports.
        bos_token_id: token that begins a text, or None.
        eos_token_ids: tokens that end a text.
        embedding_scale: multiplies token embeddings; rounded to the model's dtype first.
        logit_scale: multiplies logits.
        logit_softcap: logits become softcap * tanh(logit / softcap); None leaves them as they are.
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
        """The mixers that are multi-head attention, in the order of their layers."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    def mixer(self, layer: LayerSpec) -> MixerSpec:
        """Returns a layer's mixer, without its window if no sequence is longer than the window."""
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return mixer
        return replace(mixer, window=self.window(mixer))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The different sizes of attention heads."""
        return tuple(dict.fromkeys(mixer.head_dim for mixer in self.attention))

    def window(self, mixer: AttentionSpec) -> int | None:
        """Returns a mixer's window in tokens. Returns None for a window that is at least as long as
        the longest sequence."""
        window = mixer.window
        return None if window is None or window >= self.max_positions else window


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """A classification head: out(norm(act(dense(state)))) of one state per sequence.

    Attributes:
        classes: number of outputs.
        pooling: the state is that of the first token, or the mean over all.
        act: activation behind the first product.
        bias: whether the first product has a bias.
        norm: norm behind the activation, or None.
    """

    classes: int
    pooling: Literal["cls", "mean"]
    act: Literal["tanh", "gelu"]
    bias: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(ModelSpec):
    """An encoder: every token attends to all tokens of its sequence, and nothing is generated.

    Attributes:
        first_position: row of the first token in the table of learned positions.
        token_types: rows of the table of token types, which tell the texts of a pair apart; 0
            without a table.
        last_norm: whether a norm follows the last layer.
        classifier: the classification head, or None.
        projection: numbers of a token's vector in late interaction (ColBERT); 0 without it.
    """

    first_position: int = 0
    token_types: int = 0
    last_norm: bool = False
    classifier: ClassifierSpec | None = None
    projection: int = 0
