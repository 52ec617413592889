"""The Qwen3 architecture for training, in plain torch, and its export to the HF layout.

Grouped-query attention with a per-head RMS norm on queries and keys, rotary positions (halves
rotated, base 10000), SwiGLU, RMS norms before each block, and the output head tied to the
embedding. Parameter names are those of `transformers`' Qwen3ForCausalLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = BlockMask | Tensor | None


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, under the names of the HF config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    vocab_size: int = 6144
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


TINY = Shape(320, 8, 8, 4, 704)
DRAFT = Shape(128, 3, 2, 1, 256)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [..., positions, head_dim]."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, positions, head_dim], pairing dimension i with i + head_dim / 2."""
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; the mask is a BlockMask, a boolean tensor, or None for causal."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            s.num_attention_heads,
            s.num_key_value_heads,
            s.head_dim,
        )
        self.q_proj = nn.Linear(s.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, s.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, s.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: list[Tensor] | None, at: int
    ) -> Tensor:
        """x [batch, positions, hidden]; `cache` holds keys and values, filled from `at` on."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache[0][:, :, at : at + t] = k
            cache[1][:, :, at : at + t] = v
            k, v = cache[0][:, :, : at + t], cache[1][:, :, : at + t]
        gqa = self.heads != self.kv_heads
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v.to(q.dtype), block_mask=mask, enable_gqa=gqa)
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v.to(q.dtype), attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
            )
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask,
        drop: float,
        cache: list[Tensor] | None = None,
        at: int = 0,
    ) -> Tensor:
        a = self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, at)
        x = x + functional.dropout(a, drop, training=self.training and drop > 0)
        m = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(m, drop, training=self.training and drop > 0)


class Qwen3(nn.Module):
    """The decoder; `forward` gives logits [batch, positions, vocabulary]."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        mask: Mask = None,
        positions: Tensor | None = None,
        cache: list[list[Tensor]] | None = None,
        at: int = 0,
    ) -> Tensor:
        """tokens [batch, length]; positions default to 0, 1, 2, …, counted from `at`."""
        if positions is None:
            positions = torch.arange(at, at + tokens.shape[1], device=tokens.device)
        cos, sin = rotary(positions, self.shape.head_dim, self.shape.rope_theta)
        if cos.dim() == 3:  # positions differ from row to row: make room for the heads
            cos, sin = cos[:, None], sin[:, None]
        x = self.embed_tokens(tokens)
        x = functional.dropout(x, self.dropout, training=self.training and self.dropout > 0)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, self.dropout, cache[i] if cache else None, at)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def hf_config(shape: Shape, tokens: dict[str, int]) -> dict[str, object]:
    """`config.json`; `tokens` gives the ids of `eos` and `pad`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokens["eos"],
        "pad_token_id": tokens["pad"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def export(model: Qwen3, folder: Path, tokens: dict[str, int]) -> None:
    """Write config, generation defaults and bf16 weights; `tokens` gives `eos` and `pad` ids."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf_config(model.shape, tokens), indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": [tokens["eos"], tokens["pad"]],
        "pad_token_id": tokens["pad"],
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path, shape: Shape) -> Qwen3:
    """A model of `shape` with the weights that `export` wrote, in float32."""
    model = Qwen3(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    return model
