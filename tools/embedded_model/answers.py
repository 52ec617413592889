"""Print a model's answers to ten chat prompts, greedy and sampled, unedited.

python answers.py MODEL_DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "hello",
    "who are you?",
    "tell me a story about a cat",
    "what is the capital of France?",
    "thank you",
    "I feel a bit sad today.",
    "What can you do?",
    "Write a short story about a dragon who is afraid of the dark.",
    "tell me a joke",
    "Can you write a Python program for me?",
)


@torch.inference_mode()
def answer(model, tokenizer, prompt: str, temperature: float) -> tuple[str, bool]:
    """The answer's text, and whether it ended its turn within 400 tokens."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    how = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 40}
    if temperature == 0:
        how = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    out = model.generate(**inputs, max_new_tokens=400, **how)[0, inputs["input_ids"].shape[1] :]
    ended = out[-1].item() == tokenizer.eos_token_id
    return tokenizer.decode(out, skip_special_tokens=True), ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    for temperature in args.temperatures:
        torch.manual_seed(0)
        print(f"\n## temperature {temperature}")
        for prompt in PROMPTS:
            text, ended = answer(model, tokenizer, prompt, temperature)
            print(f"\n> {prompt}\n\n{text}" + ("" if ended else "\n[no end of turn]"))


if __name__ == "__main__":
    main()
