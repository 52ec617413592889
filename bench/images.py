"""Measures prompts with images on one GPU, offline, with random weights.

python bench/images.py FOLDER     # config.json, preprocessor_config.json and tokenizer of a
                                  # Qwen3-VL model
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire import LLM, SamplingParams
from quire.tools.bench.record import make_record
from tables import print_and_append

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
SIDE = 1024
_DRAW = np.random.default_rng(0)


def picture() -> Image.Image:
    """Returns a new image of random colours."""
    small = _DRAW.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE))


def milliseconds(llm: LLM, prompts: Any, tokens: int = 1) -> float:
    """Returns the time in which prompts get `tokens` tokens each."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return 1e3 * (time.perf_counter() - began)


def about(image: Image.Image) -> dict[str, Any]:
    return {"prompt": PROMPT, "multi_modal_data": {"image": [image]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    llm = LLM(args.folder, load_format="dummy", max_num_seqs=32, max_model_len=8192)
    for _ in range(3):
        milliseconds(llm, about(picture()))
    before = llm.stats().images
    new = [milliseconds(llm, about(picture())) for _ in range(8)]
    after = llm.stats().images
    image = picture()
    milliseconds(llm, about(image))
    again = [milliseconds(llm, {**about(image), "prompt": f"{PROMPT} {i}"}) for i in range(5)]
    texts = [milliseconds(llm, " word" * 1030 + str(i)) for i in range(5)]
    many = [about(picture()) for _ in range(32)]
    metrics = {
        "ttft_image_ms": statistics.median(new),
        "ttft_image_again_ms": statistics.median(again),
        "ttft_text_1030_ms": statistics.median(texts),
        "images_s_32": 32e3 / milliseconds(llm, many, 2),
        "encoder_ms": 1e3 * (after.encoder_seconds - before.encoder_seconds) / len(new),
    }
    settings = {"image": f"{SIDE} x {SIDE}"}
    record = make_record("images_offline", metrics, model=Path(args.folder).name, device="cuda",
                         settings=settings)  # fmt: skip
    print_and_append([record], args.out)
    llm.shutdown()


if __name__ == "__main__":
    main()
