"""A small hybrid for training, in plain torch: gated delta nets in three layers of four, attention
with a gate in the fourth, in the layout of Qwen3.5's text model.

The gated delta rule is computed in chunks of 64 tokens (Yang, Kautz, Hatamizadeh 2024, "Gated Delta
Networks"). Within a chunk, what tokens write is the solution of a triangular system; from chunk to
chunk the state goes through one product of matrices. A document begins with an empty state: its
first token's decay is all but nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from model import MLP, Mask, RMSNorm, rotary, rotate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

CHUNK = 64
RESET = -60.0
"""Added to the decay of a document's first token: exp of it is nothing in float32."""
TAPS = 4


@dataclass(frozen=True)
class HybridShape:
    """Sizes, under the names of the HF config."""

    hidden_size: int = 128
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 208
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    vocab_size: int = 6144
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Returns the outputs [B, H, T, Dv], of float32. q, k: [B, H, T, Dk], k of unit length; v:
    [B, H, T, Dv]; decay, strength: [B, H, T]. T is a multiple of `CHUNK`."""
    b, h, t, dk = k.shape
    n = t // CHUNK
    q, k, v = (x.reshape(b, h, n, CHUNK, x.shape[-1]) for x in (q, k, v))
    total = decay.reshape(b, h, n, CHUNK).cumsum(-1)
    beta = strength.reshape(b, h, n, CHUNK, 1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    system = (beta * (k @ k.mT) * between).tril(-1)
    grown = total.exp().unsqueeze(-1)
    # What is written is `own` - `seen` S, where S is the state before the chunk.
    wanted = torch.cat([beta * v, beta * grown * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, seen = solved.split([v.shape[-1], dk], dim=-1)
    kept = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT
    identity = torch.eye(dk, device=k.device)
    carry = grown[..., -1:, :] * identity - kept @ seen  # [B, H, n, Dk, Dk]
    added = kept @ own
    states = [torch.zeros_like(added[:, :, 0])]
    for chunk in range(n - 1):
        states.append(carry[:, :, chunk] @ states[-1] + added[:, :, chunk])
    state = torch.stack(states, dim=2)
    out = grown * (q @ state) + ((q @ k.mT) * between) @ (own - seen @ state)
    return out.reshape(b, h, t, -1)


class DeltaNet(nn.Module):
    """A gated delta net. Its convolution's weights are flat, so that they are no matrix to Muon."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.key_heads, self.heads = s.linear_num_key_heads, s.linear_num_value_heads
        self.key_dim, self.value_dim = s.linear_key_head_dim, s.linear_value_head_dim
        self.keys, self.values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.channels = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(s.hidden_size, self.channels, bias=False)
        self.in_proj_z = nn.Linear(s.hidden_size, self.values, bias=False)
        self.in_proj_b = nn.Linear(s.hidden_size, self.heads, bias=False)
        self.in_proj_a = nn.Linear(s.hidden_size, self.heads, bias=False)
        self.out_proj = nn.Linear(self.values, s.hidden_size, bias=False)
        self.norm = RMSNorm(self.value_dim, s.rms_norm_eps)
        self.conv = nn.Parameter((torch.rand(self.channels * TAPS) - 0.5) / TAPS**0.5 * 2)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        span = torch.rand(self.heads) * math.log(100) + math.log(1e-3)
        step = span.exp()  # from 0.001 to 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor, begins: Tensor, same: Tensor) -> Tensor:
        """x: [B, T, hidden]. begins: [B, T], whether a token is a document's first. same:
        [taps - 1, B, T], whether the token so many places before is of the same document."""
        b, t, _ = x.shape
        mixed = self._convolve(self.in_proj_qkv(x), same)
        q, k, v = mixed.split([self.keys, self.keys, self.values], dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            serves = self.heads // self.key_heads
            q, k = (self._unit(p, serves) for p in (q, k))
            v = v.float().view(b, t, self.heads, self.value_dim).transpose(1, 2)
            step = functional.softplus(self.in_proj_a(x.float()) + self.dt_bias)
            decay = -self.A_log.exp() * step + RESET * begins.unsqueeze(-1)
            strength = self.in_proj_b(x.float()).sigmoid()
            gates = decay.transpose(1, 2), strength.transpose(1, 2)
            out = delta_rule(q * self.key_dim**-0.5, k, v, *gates).transpose(1, 2)
        z = self.in_proj_z(x).float().view(b, t, self.heads, self.value_dim)
        gated = self.norm(out) * functional.silu(z)
        return self.out_proj(gated.reshape(b, t, self.values).to(x.dtype))

    def _convolve(self, x: Tensor, same: Tensor) -> Tensor:
        weight = self.conv.view(self.channels, TAPS)
        total = x.float() * weight[:, TAPS - 1]
        for back in range(1, TAPS):
            before = functional.pad(x.float(), (0, 0, back, 0))[:, : x.shape[1]]
            total = total + before * same[back - 1].unsqueeze(-1) * weight[:, TAPS - 1 - back]
        return functional.silu(total).to(x.dtype)

    def _unit(self, x: Tensor, serves: int) -> Tensor:
        x = x.float().view(*x.shape[:2], self.key_heads, self.key_dim)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(serves, dim=2).transpose(1, 2)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output is multiplied by sigmoid(gate). `q_proj` gives each
    head's queries, then its gates."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = s.num_attention_heads, s.num_key_value_heads
        self.dim, self.turned = s.head_dim, int(s.head_dim * s.partial_rotary_factor)
        self.q_proj = nn.Linear(s.hidden_size, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, s.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, s.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        b, t, _ = x.shape
        both = self.q_proj(x).view(b, t, self.heads, 2 * self.dim)
        q, gate = both.split(self.dim, dim=-1)
        q = self._turn(self.q_norm(q).transpose(1, 2), cos, sin)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        k = self._turn(k, cos, sin)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2).to(q.dtype)
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).reshape(b, t, -1))

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.split([self.turned, self.dim - self.turned], dim=-1)
        return torch.cat([rotate(turned, cos, sin), rest], dim=-1)


class HybridLayer(nn.Module):
    """A mixer and an MLP, each on a normed input and added to the residual stream."""

    def __init__(self, s: HybridShape, full: bool) -> None:
        super().__init__()
        self.full = full
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        if full:
            self.self_attn = GatedAttention(s)
        else:
            self.linear_attn = DeltaNet(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)  # type: ignore[arg-type]


class Hybrid(nn.Module):
    """The decoder; `forward` gives logits [batch, positions, vocabulary]."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            HybridLayer(shape, (i + 1) % shape.full_attention_interval == 0)
            for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, mask: Mask = None, document: Tensor | None = None) -> Tensor:
        """tokens, document: [batch, length], a multiple of 64; document: each token's document."""
        if document is None:
            document = torch.zeros_like(tokens)
        turned = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary(positions, turned, self.shape.rope_theta)
        padded = functional.pad(document, (TAPS - 1, 0), value=-2)
        width = tokens.shape[1]
        same = torch.stack(
            [padded[:, TAPS - 1 - n : TAPS - 1 - n + width] == document for n in range(1, TAPS)]
        ).float()
        begins = 1 - same[0]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            if layer.full:
                x = x + layer.self_attn(normed, cos, sin, mask)
            else:
                x = x + layer.linear_attn(normed, begins, same)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def hybrid_config(shape: HybridShape, tokens: dict[str, int]) -> dict[str, object]:
    """`config.json`; `tokens` gives the ids of `eos` and `pad`."""
    sizes = {name: getattr(shape, name) for name in HybridShape.__dataclass_fields__}
    theta, factor = sizes.pop("rope_theta"), sizes.pop("partial_rotary_factor")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **sizes,
        "linear_conv_kernel_dim": TAPS,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
        },
        "tie_word_embeddings": True,
        "eos_token_id": tokens["eos"],
        "pad_token_id": tokens["pad"],
        "torch_dtype": "bfloat16",
    }


def export_hybrid(model: Hybrid, folder: Path, tokens: dict[str, int]) -> None:
    """Writes config and bf16 weights. Norms outside the gated delta nets are saved less 1."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, value in model.state_dict().items():
        value = value.detach().to("cpu", torch.float32)
        if name.endswith("linear_attn.conv"):
            name, value = f"{name}1d.weight", value.view(-1, 1, TAPS)
        elif "norm" in name and "linear_attn" not in name:
            value = value - 1
        weights[f"model.{name}"] = value.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.dumps(hybrid_config(model.shape, tokens), indent=2)
    (folder / "config.json").write_text(config + "\n")
