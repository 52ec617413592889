"""An EAGLE-3 head for quire-tiny, in plain torch (Li et al. 2025).

One layer over pairs: at position p, what the model computed there and the embedding of the token
behind. It is trained as it is used: what it gives takes the place of the model's hidden states, for
as many drafts as `DEPTH`, and the attention of a draft sees pairs of the model's up to where the
drafts begin and pairs of its own behind ("training-time test").
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from model import MLP, Qwen3, RMSNorm, Shape, rotary, rotate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

DEPTH = 6
SHARE = 0.8
"""Weight of a draft's loss, over that of the draft before it."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, and the model's layers behind which it reads."""

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 80
    taps: tuple[int, ...] = (4, 8)


class PairAttention(nn.Module):
    """Attention twice as wide as what it adds to."""

    def __init__(self, hidden: int, s: HeadShape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(2 * hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, hidden, bias=False)

    def forward(
        self, x: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor, earlier: list[list[Tensor]]
    ) -> Tensor:
        """x: [B, T, 2 hidden]. seen: [B, T, T], the model's pairs that a pair sees. earlier: keys
        and values [B, H, T, D] of the drafts before, the model's pairs first; gets those of x."""
        b, t, _ = x.shape
        s = self.s
        q = rotate(self.q_proj(x).view(b, t, s.heads, s.head_dim).transpose(1, 2), *turns)
        k = rotate(self.k_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2), *turns)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        repeat = s.heads // s.kv_heads
        earlier.append([y.repeat_interleave(repeat, dim=1) for y in (k, v)])
        depth = len(earlier) - 1
        scale = s.head_dim**-0.5
        first_k, first_v = earlier[0]
        scores = (q @ first_k.mT).float() * scale
        scores = scores.masked_fill(~seen[:, None], -1e9)
        behind = []
        for place in range(1, depth + 1):
            shifted = [_later(y, depth - place) for y in earlier[place]]
            scores = torch.cat(
                [scores, (q * shifted[0]).sum(-1, keepdim=True).float() * scale], dim=-1
            )
            behind.append(shifted[1])
        weights = scores.softmax(-1).to(v.dtype)
        out = weights[..., :t] @ first_v
        for place, value in enumerate(behind):
            out = out + weights[..., t + place : t + place + 1] * value
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


def _later(x: Tensor, places: int) -> Tensor:
    """Returns x [B, H, T, D] moved back in time: at t what was at t - places."""
    return functional.pad(x, (0, 0, places, 0))[:, :, : x.shape[2]] if places else x


class PairLayer(nn.Module):
    """h + attention(norm(embedding), norm(h)), then h + mlp(norm(h))."""

    def __init__(self, target: Shape, s: HeadShape) -> None:
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = PairAttention(hidden, s)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(Shape(hidden, 1, s.heads, s.kv_heads, s.intermediate_size))


class EagleHead(nn.Module):
    """The head; the model lends its embeddings, which are its LM head too."""

    def __init__(self, target: Shape, s: HeadShape) -> None:
        super().__init__()
        self.target, self.s = target, s
        wide = target.hidden_size * len(s.taps)
        self.input_norm = RMSNorm(wide, target.rms_norm_eps)
        self.fc = nn.Linear(wide, target.hidden_size, bias=False)
        self.midlayer = PairLayer(target, s)
        self.norm = RMSNorm(target.hidden_size, target.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, tapped: Tensor, embedded: Tensor, document: Tensor, depth: int
    ) -> list[Tensor]:
        """Returns states [B, T, hidden], normed for the LM head, of each draft.

        tapped: [B, T, taps * hidden] of the model. embedded: [B, T, hidden] of the token behind
        each position. document: [B, T]. Entry j, at t, is the draft of token t + 2 after j drafts.
        """
        t = tapped.shape[1]
        positions = torch.arange(t, device=tapped.device)
        turns = rotary(positions, self.s.head_dim, self.target.rope_theta)
        together = document[:, :, None] == document[:, None, :]
        hidden = self.fc(self.input_norm(tapped))
        layer, earlier, found = self.midlayer, list[list[Tensor]](), []
        embedded = layer.input_layernorm(embedded)
        for j in range(depth):
            seen = together & (positions[:, None] - j >= positions[None, :])
            pair = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
            hidden = hidden + layer.self_attn(pair, turns, seen, earlier)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.norm(hidden))
            hidden = functional.pad(hidden, (0, 0, 1, 0))[:, :t]
        return found


def tap(model: Qwen3, tokens: Tensor, mask: object, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the model's streams behind some layers, side by side, and its final normed states."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    turns = rotary(positions, model.shape.head_dim, model.shape.rope_theta)
    x, streams = model.embed_tokens(tokens), []
    for number, layer in enumerate(model.layers, 1):
        x = layer(x, *turns, mask, 0.0)
        if number in taps:
            streams.append(x)
    return torch.cat(streams, dim=-1), model.norm(x)


def draft_losses(
    states: list[Tensor],
    wanted: Tensor,
    weight: Tensor,
    document: Tensor,
    learned: Tensor,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss, and how often each draft is the model's likeliest token, [depth].

    The draft at t is compared with the model at t + 1.

    Args:
        wanted: the model's logits at each place, [B, T, vocab].
        weight: rows of the LM head for the tokens that can be drafted, [draft vocab, hidden].
        learned: whether the token behind a position is learned, bool [B, T].
        kept: those tokens, int64 [draft vocab]. None: all tokens.
    """
    wanted = wanted[:, 1:].float()
    target, best = wanted.softmax(-1), wanted.argmax(-1)
    if kept is not None:
        # A token that cannot be drafted becomes -1, which no draft equals.
        draft_id = torch.full_like(wanted[0, 0], -1, dtype=torch.long)
        draft_id[kept] = torch.arange(len(kept), device=kept.device)
        target, best = target[..., kept], draft_id[best]
    loss = wanted.new_zeros(())
    agreed = []
    for j, state in enumerate(states):
        logits = functional.linear(state[:, :-1], weight).float()
        start = functional.pad(document, (j, 0), value=-2)[:, : document.shape[1]]
        counts = (
            learned[:, 1:] & (start == document)[:, :-1] & (document[:, 1:] == document[:, :-1])
        )
        entropy = -(target * functional.log_softmax(logits, dim=-1)).sum(-1)
        total = counts.sum().clamp(min=1)
        loss = loss + SHARE**j * (entropy * counts).sum() / total
        agreed.append(((logits.argmax(-1) == best) & counts).sum() / total)
    return loss, torch.stack(agreed)


def head_config(target: Shape, s: HeadShape) -> dict[str, object]:
    """`config.json`, as published heads have it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "norm_before_fc": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(s.taps),
            "use_aux_hidden_state": True,
        },
    }


def export_head(head: EagleHead, folder: Path) -> None:
    """Writes config and bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.dumps(head_config(head.target, head.s), indent=2)
    (folder / "config.json").write_text(config + "\n")
