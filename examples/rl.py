"""Trains the embedded model by reinforcement: GRPO in plain PyTorch, on a CPU in a few minutes.

    python examples/rl.py [STEPS]

The reward is the share of short words in a story. Each step samples a group of stories for each
prompt, compares each story with its group's mean (Shao et al., 2024), and updates the weights of
the engine, which stays. The printed gap is the mean difference between the engine's
log-probabilities and the trainer's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import quire
from quire import LLM, SamplingParams

FOLDER = Path(quire.__file__).parent / "embedded" / "quire-tiny"
CONFIG = json.loads((FOLDER / "config.json").read_text())
HEADS, KV_HEADS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
DIM = CONFIG["head_dim"]
PROMPTS = ["Once upon a time", "One day, a girl"]
GROUP, TOKENS, LEARNING_RATE = 8, 24, 2e-4


def reward(text: str) -> float:
    """Returns the share of words of at most three letters."""
    words = ["".join(filter(str.isalpha, word)) for word in text.split()]
    return sum(1 <= len(word) <= 3 for word in words) / max(1, len(words))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x: Tensor) -> Tensor:
    """Applies rotary positions to x [batch, heads, length, dim]."""
    inverse = CONFIG["rope_theta"] ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(x.shape[2]), inverse).repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()


def log_probs(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Returns each token's log-probability after those before it, [batch, length - 1]."""
    embedding = weights["model.embed_tokens.weight"]
    x, (batch, length) = embedding[ids], ids.shape
    for layer in range(CONFIG["num_hidden_layers"]):
        w = {n.split(".", 3)[3]: t for n, t in weights.items() if f".layers.{layer}." in n}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (y @ w[f"self_attn.{n}_proj.weight"].t())
            .view(batch, length, heads, DIM)
            .transpose(1, 2)
            for n, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q = rotate(norm(q, w["self_attn.q_norm.weight"]))
        k = rotate(norm(k, w["self_attn.k_norm.weight"]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].t()
        y = norm(x, w["post_attention_layernorm.weight"])
        gate, up = (y @ w[f"mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].t()
    logits = norm(x, weights["model.norm.weight"])[:, :-1] @ embedding.t()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


def main(steps: int) -> None:
    stored = load_file(FOLDER / "model.safetensors")
    weights = {name: tensor.float().requires_grad_() for name, tensor in stored.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)
    llm = LLM(dtype="float32")
    for step in range(steps):
        params = SamplingParams(n=GROUP, max_tokens=TOKENS, ignore_eos=True, logprobs=0, seed=step)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stories = [(output.prompt_token_ids, each) for output in outputs for each in output.outputs]
        assert all(each.weight_versions == [(step, TOKENS)] for _, each in stories)
        rewards = torch.tensor([reward(each.text) for _, each in stories]).view(-1, GROUP)
        gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        # Prompts differ in length. Padding comes last, so no story sees it.
        texts = [torch.tensor([*prompt, *each.token_ids]) for prompt, each in stories]
        found = log_probs(weights, torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        starts = [len(prompt) - 1 for prompt, _ in stories]
        own = torch.stack([row[s : s + TOKENS] for row, s in zip(found, starts, strict=True)])
        sampled = torch.tensor(
            [[next(iter(e.values())).logprob for e in each.logprobs or []] for _, each in stories]
        )
        loss = -((own - sampled).exp() * gain.view(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        llm.update_weights(
            ((name, t.detach()) for name, t in weights.items()), label=f"step {step}"
        )
        gap = (own - sampled).abs().mean()
        print(f"step {step}: reward {rewards.mean():.3f}, gap {gap:.1e}", flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
