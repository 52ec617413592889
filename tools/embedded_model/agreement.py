"""Counts how often a draft's greedy choice is the model's own, on the model's greedy answers.

    python agreement.py MODEL_DIR DRAFT_DIR held_out.json [--device cuda]

The model answers each prompt greedily (at most --limit tokens). The draft then reads prompt and
answer, and its likeliest next token is compared with the answer's at every place, the end of turn
among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def agreement(
    model_dir: Path, draft_dir: Path, prompts: list, device: str = "cpu", limit: int = 256
) -> dict[str, float]:
    """Counts of answer tokens and of those the draft chose too, and their ratio."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # bf16 is slow on most CPUs
    model, draft = (
        AutoModelForCausalLM.from_pretrained(d, dtype=dtype).to(device).eval()
        for d in (model_dir, draft_dir)
    )
    agreed = total = ended = 0
    by_prompt = []
    for i in range(0, len(prompts), 20):
        part = [
            tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False)
            for p in prompts[i : i + 20]
        ]
        inputs = tokenizer(part, return_tensors="pt", padding=True).to(device)
        width = inputs["input_ids"].shape[1]
        full = model.generate(
            **inputs,
            max_new_tokens=limit,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        for row, mask in zip(full, inputs["attention_mask"], strict=True):
            answer = row[width:]
            stops = (answer == tokenizer.eos_token_id).nonzero()
            if len(stops):
                answer, ended = answer[: int(stops[0]) + 1], ended + 1
            prompt = row[:width][mask.bool()]
            choice = draft(torch.cat([prompt, answer])[None]).logits[0].argmax(-1)
            same = int((choice[len(prompt) - 1 : -1] == answer).sum())
            agreed, total = agreed + same, total + len(answer)
            by_prompt.append(same / len(answer))
        print(f"{i + len(part)} prompts: {agreed} of {total} tokens", file=sys.stderr, flush=True)
    return {
        "prompts": len(prompts),
        "answers_ended": ended,
        "tokens": total,
        "agreed": agreed,
        "agreement": agreed / total,
        "mean_of_prompts": sum(by_prompt) / len(by_prompt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=256)
    args = parser.parse_args()
    prompts = json.loads(args.prompts.read_text())
    print(json.dumps(agreement(args.model, args.draft, prompts, args.device, args.limit)))


if __name__ == "__main__":
    main()
