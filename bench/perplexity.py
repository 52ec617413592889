"""Perplexity of a model over texts, with each way to store KV, through the engine.

    python bench/perplexity.py wikitext2.test.raw.xz tinystories_valid.txt.xz \
        [--kv-cache-dtype auto,fp8,fp8_dynamic,int8] [--tokens 50000] [--out perplexity.jsonl]

The text's tokens are cut into windows, which are prompts; every token but a window's first counts,
by the log-probability that the engine gives for it. A window is computed `--chunk` tokens at a
time, so that nearly all keys and values come from the cache, as they do when answers are written.
"""

from __future__ import annotations

import argparse
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from quire import LLM, SamplingParams
from quire.bench.record import append_jsonl, format_table, make_record

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
AT_ONCE = 4


def read(file: Path) -> str:
    data = file.read_bytes()
    return (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")


def windows(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    # A few characters a token: no more is read than is used.
    ids = llm.get_tokenizer().encode(text[: 12 * tokens])[:tokens]
    cut = [ids[at : at + window] for at in range(0, len(ids), window)]
    return [part for part in cut if len(part) > 1]


def logprobs(llm: LLM, prompts: list[list[int]]) -> Iterator[float]:
    """Yields the log-probability of every token but the prompts' first."""
    for at in range(0, len(prompts), AT_ONCE):
        given = [{"prompt_token_ids": prompt} for prompt in prompts[at : at + AT_ONCE]]
        for output in llm.generate(given, PARAMS, use_tqdm=False):
            found = output.prompt_logprobs or []
            for token, entry in zip(output.prompt_token_ids, found, strict=True):
                if entry is not None:
                    yield entry[token].logprob


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", type=Path, nargs="+", help="UTF-8 text, or the same in .xz")
    parser.add_argument("--model", help="folder or hub id; left out: the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto,fp8,fp8_dynamic,int8")
    parser.add_argument("--tokens", type=int, default=50_000, help="of each text")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    records = []
    first: dict[str, float] = {}
    for kind in args.kv_cache_dtype.split(","):
        llm = LLM(
            args.model, device=device, dtype=args.dtype, kv_cache_dtype=kind,
            max_num_batched_tokens=args.chunk, max_num_seqs=AT_ONCE, enable_prefix_caching=False,
            max_model_len=args.window + 1,
        )  # fmt: skip
        for text in args.texts:
            began = time.perf_counter()
            prompts = windows(llm, read(text), args.tokens, args.window)
            found = torch.tensor(list(logprobs(llm, prompts)), dtype=torch.float64)
            perplexity = math.exp(-found.mean().item())
            base = first.setdefault(text.name, perplexity)
            metrics = {
                "perplexity": perplexity,
                "change_percent": 100 * (perplexity / base - 1),
                "tokens": float(len(found)),
                "seconds": time.perf_counter() - began,
            }
            settings = {
                "text": text.name, "kv_cache_dtype": kind, "dtype": args.dtype,
                "window": args.window, "chunk": args.chunk,
            }  # fmt: skip
            case = f"perplexity {text.name} {kind}"
            model = args.model or "quire-tiny"
            records.append(
                make_record(case, metrics, model=model, device=device, settings=settings)
            )
            print(format_table(records[-1:]).splitlines()[-1], flush=True)
        llm.shutdown()
    if args.out is not None:
        append_jsonl(args.out, records)
    print(format_table(records))


if __name__ == "__main__":
    main()
