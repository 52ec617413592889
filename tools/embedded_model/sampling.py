"""Batched generation with the training model, to make the answers that the draft learns from."""

from __future__ import annotations

import torch
from model import Qwen3
from torch import Tensor


@torch.inference_mode()
def generate(
    model: Qwen3, prompts: list[list[int]], limit: int, temperature: float, stop: int, pad: int
) -> list[list[int]]:
    """Answers to `prompts`, up to and with `stop`; greedy at temperature 0.

    Prompts are padded on the left; positions count from each prompt's first real token.
    """
    shape, device = model.shape, next(model.parameters()).device
    rows, width = len(prompts), max(len(p) for p in prompts)
    tokens = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    skip = torch.tensor([width - len(p) for p in prompts], device=device)
    size = (rows, shape.num_key_value_heads, width + limit, shape.head_dim)
    dtype = model.embed_tokens.weight.dtype
    cache = [[torch.zeros(size, device=device, dtype=dtype) for _ in "kv"] for _ in model.layers]
    index = torch.arange(width + limit, device=device)
    real = index[None, :] >= skip[:, None]  # [rows, width + limit]
    mask = real[:, None, :width] & (index[:width, None] >= index[None, :width])
    mask = mask | torch.eye(width, device=device).bool()  # a pad sees itself, so nothing is NaN
    positions = (index[None, :] - skip[:, None]).clamp(min=0)
    logits = model(tokens, mask[:, None], positions[:, :width], cache, 0)[:, -1]
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    out = []
    for at in range(width, width + limit):
        new = torch.where(done, pad, choose(logits.float(), temperature))
        out.append(new)
        done |= new == stop
        if at % 16 == 0 and bool(done.all()):
            break
        seen = real[:, None, None, : at + 1]
        logits = model(new[:, None], seen, positions[:, at : at + 1], cache, at)[:, -1]
    answers = torch.stack(out, dim=1).tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in answers]


def choose(logits: Tensor, temperature: float) -> Tensor:
    """One token a row: the likeliest at temperature 0, else sampled."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
