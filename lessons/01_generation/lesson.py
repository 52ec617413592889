"""Autoregressive generation: a Qwen3 in plain PyTorch, one token at a time.

Run it from the repository's root: python -m lessons 1 [--model Qwen/Qwen3-0.6B]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams


class Qwen3:
    """A decoder over a checkpoint's tensors, by the names that they have in its files."""

    def __init__(self, model: Loaded) -> None:
        config = model.config
        if config["model_type"] != "qwen3":
            sys.exit(f"this lesson builds Qwen3; {model.path.name} is a {config['model_type']}")
        self.w = model.weights
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        # One frequency for each pair of dimensions of a head: from 1 down to 1 / theta.
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """ids: int64 [T], tokens at positions from `start` on. Returns the logits after the last
        one, [vocab]."""
        positions = torch.arange(start, start + len(ids))
        x = self.w["model.embed_tokens.weight"][ids]  # [T, hidden]
        for layer in range(self.layers):
            x = x + self.attention(self.norm(x, layer, "input_layernorm"), layer, positions)
            x = x + self.mlp(self.norm(x, layer, "post_attention_layernorm"), layer)
        last = self.rms_norm(x[-1], self.w["model.norm.weight"])
        # Tied models use the embeddings again.
        return F.linear(last, self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]))

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        return self.rms_norm(x, self.w[f"model.layers.{layer}.{name}.weight"])

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        return F.linear(x, self.w[f"model.layers.{layer}.{name}_proj.weight"])

    def attention(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """x: [T, hidden], all tokens so far. Returns the same shape."""
        q, k, v = self.qkv(x, layer, positions)
        causal = positions[:, None] >= positions[None, :]  # a token sees itself and what is before
        return self.attend(q, k, v, causal, layer)

    def qkv(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [heads, T, head_dim], and k and v [kv_heads, T, head_dim]."""
        q, k, v = (
            self.linear(x, layer, f"self_attn.{each}").view(len(x), -1, self.head_dim)
            for each in "qkv"
        )
        q = self.rotate(self.norm(q, layer, "self_attn.q_norm"), positions)
        k = self.rotate(self.norm(k, layer, "self_attn.k_norm"), positions)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, head_dim]. Turns the pair (i, i + head_dim / 2) by position x frequency."""
        angles = positions[:, None, None] * self.frequencies
        (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: int) -> Tensor:
        """mask: bool [queries, keys], what each query sees. Returns [queries, hidden]."""
        share = self.heads // self.kv_heads  # query heads that read one head of k and v
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(self.head_dim)).masked_fill(~mask, -math.inf)
        seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.linear(seen, layer, "self_attn.o")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        gated = F.silu(self.linear(x, layer, "mlp.gate")) * self.linear(x, layer, "mlp.up")
        return self.linear(gated, layer, "mlp.down")


def greedy(logits: Tensor) -> int:
    return int(logits.argmax())


def sample(logits: Tensor) -> int:
    """Draws from the 50 likeliest tokens, at temperature 0.8."""
    values, ids = logits.topk(50)
    return int(ids[torch.multinomial((values / 0.8).softmax(-1), 1)])


def generate(
    forward: Callable[[Tensor], Tensor], ids: list[int], count: int, pick: Callable[[Tensor], int]
) -> list[int]:
    """Appends `count` tokens, each picked from the logits after all before it; returns them."""
    ids = list(ids)
    for _ in range(count):
        ids.append(pick(forward(torch.tensor(ids))))
    return ids[-count:]


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    args = options.parse_args(arguments)
    model = load(args)
    qwen, tokenizer = Qwen3(model), model.tokenizer
    prompt = tokenizer.encode("Once upon a time").tolist()
    rows: list[tuple[int, int, float]] = []

    def timed(ids: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = qwen.forward(ids)
        rows.append((len(rows) + 1, len(ids), 1e3 * (time.perf_counter() - began)))
        return logits

    ours = generate(timed, prompt, args.tokens, greedy)
    print("greedy: ", repr(tokenizer.hub.decode(ours)))
    sampled = generate(qwen.forward, prompt, args.tokens // 2, sample)
    print("sampled:", repr(tokenizer.hub.decode(sampled)), "\n")
    print(table(["token", "positions computed", "ms"], rows[:: max(1, len(rows) // 8)]), "\n")

    # The shipped engine: the same weights, and everything that the later lessons add.
    llm = LLM(str(model.path), device="cpu", max_model_len=1024, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()
    equal = sum(a == b for a, b in zip(ours, output.outputs[0].token_ids, strict=True))
    check(equal == args.tokens, f"{equal} of {args.tokens} greedy tokens are the engine's")
    computed, new = sum(row[1] for row in rows), len(prompt) + args.tokens - 1
    check(computed > 2 * new, f"{computed:,} positions computed, {new} of them for the first time")


if __name__ == "__main__":
    main()
