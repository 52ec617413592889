"""Check a finished folder: `transformers` gives the training model's logits, any text round-trips.

python hf_check.py MODEL_DIR
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

import torch
from model import Shape, load
from transformers import AutoModelForCausalLM, AutoTokenizer

ODD_TEXTS = (
    "plain text",
    "  two  spaces \n\n\ttab\r\n",
    "naïve café — “quotes”",
    "日本語と한국어",
    "👩‍👩‍👧‍👦 🇫🇷",
    "e\u0301 is not \u00e9",
    "\u0000\u0007\ufeff\u200d",
    "עברית العربية हिन्दी",
    "x" * 500,
    "1234567890",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{f.name: config[f.name] for f in fields(Shape)})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ODD_TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(ids) != text:
            raise SystemExit(f"{text!r} comes back as {tokenizer.decode(ids)!r}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    if prompt != "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n":
        raise SystemExit(f"the chat template gives {prompt!r}")
    ids = torch.tensor([tokenizer(prompt * 5)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs, ours = model(ids).logits, load(folder, shape).eval()(ids)
    error = ((theirs - ours).norm() / theirs.norm()).item()
    size = (folder / "model.safetensors").stat().st_size
    count = sum(p.numel() for p in load(folder, shape).parameters())
    print(f"{folder.name}: {count:,} parameters, {size:,} bytes, logits differ by {error:.1e}")
    if error > 1e-4:
        raise SystemExit("transformers and the training model disagree")


if __name__ == "__main__":
    main()
