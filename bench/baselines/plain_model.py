"""A decoder in plain PyTorch with a contiguous cache, over the weights of Quire's own model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.norm import LayerNorm
from quire.models import Decoder
from quire.models.decoder import Block

_ACTIVATIONS = {
    "silu_and_mul": F.silu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


class PlainModel:
    """Runs dense decoders with plain attention: GPT-2, Llama, Qwen2, Qwen3.

    Raises:
        ValueError: the model has layers of another kind.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.layers: list[Any] = list(decoder.layers)
        self.decoder = decoder
        for block in self.layers:
            spec = getattr(block.attention, "spec", None)
            plain = type(block) is Block and block.mlp.act in _ACTIVATIONS
            if not plain or spec.window or spec.softcap or spec.sinks:
                raise ValueError("the baselines run decoders of plain attention and dense layers")
        first = self.layers[0].attention
        self.spec, self.device, self.dtype = first.spec, decoder.device, decoder.dtype
        self.rotary = first._rotary[0]

    def cache(self, rows: int, longest: int) -> Tensor:
        """Returns room for keys and values, [layers, 2, rows, KV heads, longest, head_dim]."""
        shape = len(self.layers), 2, rows, self.spec.kv_heads, longest, self.spec.head_dim
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def step(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Tensor | None = None,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Returns the likeliest next token of each row, int64 [rows].

        Args:
            ids, positions: int64 [rows, new].
            cache: the cache of these rows. None means that the rows are whole texts.
            slots: int64 [rows, new], columns of the cache for the new tokens.
            mask: bool [rows, 1, new, columns], the first columns of the cache that each token sees.
                None is causal.
            last: int64 [rows], the place of each row's last token. None: the last column.
        """
        table = self.decoder.embedding.weight
        x = table[ids]
        if self.decoder.positions is not None:
            x = x + self.decoder.positions.weight[positions]
        for index, block in enumerate(self.layers):
            kv = None if cache is None else cache[index]
            x = x + self._attention(
                block.attention, _norm(block.attention_norm, x), positions, kv, slots, mask
            )
            x = x + _mlp(block.mlp, _norm(block.mlp_norm, x))
        x = x[:, -1] if last is None else x[torch.arange(len(x), device=x.device), last]
        x = _norm(self.decoder.norm, x)
        return F.linear(x, self.decoder.head.weight.values).argmax(-1)

    def _attention(
        self,
        layer: Any,
        x: Tensor,
        positions: Tensor,
        kv: Tensor | None,
        slots: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        rows, new, _ = x.shape
        spec = self.spec
        qkv = _linear(layer.qkv, x).view(rows, new, -1, spec.head_dim)
        q, k, v = qkv.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=2)
        if layer.q_norm is not None:
            q, k = _norm(layer.q_norm, q), _norm(layer.k_norm, k)
        if self.rotary is not None:
            cos, sin = self.rotary.cos_sin[positions].unsqueeze(2).chunk(2, dim=-1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if kv is not None and slots is not None:
            place = torch.arange(rows, device=x.device).unsqueeze(1)
            kv[0][place, :, slots], kv[1][place, :, slots] = k.transpose(1, 2), v.transpose(1, 2)
            if mask is not None:
                k, v = kv[:, :, :, : mask.shape[-1]]
        if new == 1 and mask is not None:
            # Heads of one KV head take the place of tokens, so that keys are not repeated.
            q = q.reshape(rows, spec.kv_heads, -1, spec.head_dim)
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=spec.scale)
            return _linear(layer.out, out.reshape(rows, 1, -1))
        grouped = spec.heads != spec.kv_heads
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=spec.scale, enable_gqa=grouped
        )
        return _linear(layer.out, out.transpose(1, 2).reshape(rows, new, -1))


def _linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.values, layer.bias)


def _mlp(layer: Any, x: Tensor) -> Tensor:
    inner = _linear(layer.up, x)
    if layer.act.endswith("_and_mul"):
        gate, up = inner.chunk(2, dim=-1)
        inner = _ACTIVATIONS[layer.act](gate) * up
    else:
        inner = _ACTIVATIONS[layer.act](inner)
    return _linear(layer.down, inner)


def _norm(norm: nn.Module | Any, x: Tensor) -> Tensor:
    width = norm.weight.shape
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, width, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, width, norm.weight, norm.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs i and i + width of x [rows, new, heads, head_dim]."""
    width = cos.shape[-1]
    a, b, rest = x.float().split([width, width, x.shape[-1] - 2 * width], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)
