"""A vision transformer as data."""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers.norm import NormSpec
from quire.ops import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision transformer whose outputs are embeddings of a language model.

    Attributes:
        layers: number of layers.
        hidden_size: numbers of a patch's hidden state.
        heads: attention heads.
        width: width of the feed-forward layers.
        act: their activation; a gated one has two projections before it.
        norm: kind of all norms.
        channels: channels of a pixel.
        temporal: frames of a patch.
        patch: side of a patch in pixels.
        patch_bias: whether the first projection has a bias.
        merge: side of the square of patches whose states become one output.
        outputs: numbers of an output, the hidden size of the language model.
        theta: base of the rotary frequencies.
        side: side of the square of learned positions, which are interpolated; 0 without them.
        deepstack: layers after which further outputs are read (DeepStack, Meng et al. 2024).
        window: side in pixels of the windows of attention; 0 if all layers see the whole image.
        full_layers: layers that see the whole image in spite of `window`.
    """

    layers: int
    hidden_size: int
    heads: int
    width: int
    act: Activation
    norm: NormSpec
    channels: int
    temporal: int
    patch: int
    patch_bias: bool
    merge: int
    outputs: int
    theta: float
    side: int = 0
    deepstack: tuple[int, ...] = ()
    window: int = 0
    full_layers: frozenset[int] = frozenset()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def merged(self) -> int:
        """Numbers of the states that become one output."""
        return self.hidden_size * self.merge**2

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.temporal * self.patch**2
