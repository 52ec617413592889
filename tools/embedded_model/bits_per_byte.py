"""Bits per byte of a causal language model in HF layout on a text of `<|endoftext|>` documents.

    python bits_per_byte.py MODEL_DIR TEXT [--device cuda]

Each document is scored on its own after the model's beginning-of-text token (BOS where there is
one, `<|endoftext|>` otherwise), every text token counts, and the separators do not. A document
longer than the context is scored in windows that overlap by half.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from corpus import read_documents
from transformers import AutoModelForCausalLM, AutoTokenizer


def windows(length: int, context: int) -> list[tuple[int, int, int]]:
    """(start, end, first scored position) of each window over `length` positions."""
    if length <= context:
        return [(0, length, 0)]
    half = context // 2
    spans = [(0, context, 0)]
    while spans[-1][1] < length:
        end = min(spans[-1][1] + half, length)
        spans.append((end - context, end, spans[-1][1]))
    return spans


@torch.inference_mode()
def document_nats(model: torch.nn.Module, ids: list[int], context: int) -> float:
    """Total negative log-likelihood of ids[1:], each given what comes before it."""
    device = next(model.parameters()).device
    tokens = torch.tensor(ids, device=device)
    total = 0.0
    for start, end, first in windows(len(ids) - 1, context):
        logits = model(tokens[None, start:end]).logits[0].float()  # [window, vocabulary]
        losses = torch.nn.functional.cross_entropy(
            logits, tokens[start + 1 : end + 1], reduction="none"
        )
        total += losses[first - start :].sum().item()
    return total


def bits_per_byte(folder: Path, text: Path, device: str = "cpu") -> dict[str, float]:
    """Bits per byte, and what it was computed from."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    first = tokenizer.bos_token_id
    if first is None:
        first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    nats = tokens = size = 0.0
    for document in read_documents(text):
        ids = tokenizer(document, add_special_tokens=False)["input_ids"]
        nats += document_nats(model, [first, *ids], config["max_position_embeddings"])
        tokens += len(ids)
        size += len(document.encode("utf-8"))
    return {
        "bits_per_byte": nats / math.log(2) / size,
        "nats_per_token": nats / tokens,
        "tokens": tokens,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "model": args.model.name,
                **bits_per_byte(**{"folder": args.model, "text": args.text, "device": args.device}),
            }
        )
    )


if __name__ == "__main__":
    main()
