"""quire-tiny's own answers to training prompts, as documents for the draft to learn from."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from model import Qwen3
from sampling import generate


def prompts_of(chat: Path, start: int, count: int, longest: int = 160) -> list[list[int]]:
    """`count` of the distinct prefixes of training conversations after which an assistant speaks.

    `start` is the id of the turn start. A prompt is everything before a learned span.
    """
    with np.load(chat) as arrays:
        tokens, learn, starts = arrays["tokens"], arrays["learn"], arrays["starts"]
    begins = np.flatnonzero((learn[1:] == 1) & (learn[:-1] == 0)) + 1
    documents = np.searchsorted(starts, begins, side="right") - 1
    seen: dict[bytes, list[int]] = {}
    for begin, document in zip(begins, documents, strict=True):
        prompt = tokens[starts[document] : begin]
        if len(prompt) <= longest and prompt[0] == start:
            seen.setdefault(prompt.tobytes(), prompt.tolist())
    every = [seen[key] for key in sorted(seen)]
    return sorted(random.Random(0).sample(every, min(count, len(every))), key=len)


def answer_all(
    model: Qwen3, prompts: list[list[int]], settings: dict[str, int], batch: int, limit: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(prompt + answer + end of text, learn marks), greedy and at temperature 0.7 for each."""
    documents, marks = [], []
    for i in range(0, len(prompts), batch):
        part = prompts[i : i + batch]
        for temperature in (0.0, 0.7):
            torch.manual_seed(i)
            answers = generate(model, part, limit, temperature, settings["eos"], settings["pad"])
            for prompt, answer in zip(part, answers, strict=True):
                documents.append([*prompt, *answer, settings["pad"]])
                marks.append([0] * len(prompt) + [1] * len(answer) + [0])
    return documents, marks


def save_documents(path: Path, documents: list[list[int]], marks: list[list[int]]) -> None:
    """In the format of `prepare.Store.save`."""
    lengths = np.array([len(d) for d in documents])
    np.savez(
        path,
        tokens=np.concatenate([np.array(d, dtype=np.uint16) for d in documents]),
        learn=np.concatenate([np.array(m, dtype=np.uint8) for m in marks]),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
    )
    print(f"{path.name}: {len(lengths):,} answers, {lengths.sum():,} tokens", flush=True)
