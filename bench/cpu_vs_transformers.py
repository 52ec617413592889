"""Compares Quire with `transformers.generate` on this machine's CPU, as ratios within one process.

    python bench/cpu_vs_transformers.py [--tokens 24] [--rounds 5] [--out bench/results/cpu.jsonl]

Both engines compute SmolLM2-135M's shape in fp32, from random checkpoints in bfloat16 and in fp32.
Rounds alternate between the engines, so other work slows both. A decoding step is the difference
between a long answer and a short one. Times are wall clock and CPU seconds. Other programs disturb
CPU seconds less with one thread (OMP_NUM_THREADS=1). Ratios are of medians, with the least and the
most of a round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.tools.bench.record import make_record
from tables import print_and_append

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
PROMPT_TOKENS = 64
CONCURRENT = 16
CASES = "bfloat16", "float32"


class Peer:
    """`transformers` on the checkpoint in a folder."""

    def __init__(self, folder: str) -> None:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Returns the first answer."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        if out.shape[1] != len(prompts[0]) + tokens:
            raise SystemExit("transformers stopped early")
        answer: list[int] = out[0, len(prompts[0]) :].tolist()
        return answer


class Ours:
    """Quire on the checkpoint in a folder."""

    def __init__(self, folder: str) -> None:
        self.llm = LLM(
            folder,
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_cache_gb=0.5,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Returns the first answer."""
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        return list(self.llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)


@contextmanager
def checkpoint(dtype: str) -> Iterator[str]:
    """Yields a folder with a checkpoint of random weights while the context lasts."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMOLLM2_135M)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        yield folder


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall clock's and the processor's seconds."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def step(work: Callable[[int], object], tokens: int) -> tuple[float, float]:
    """Returns the seconds of a decoding step of `work`, which answers with so many tokens."""
    short, long = seconds(lambda: work(2)), seconds(lambda: work(2 + tokens))
    return (long[0] - short[0]) / tokens, (long[1] - short[1]) / tokens


def measure(dtype: str, tokens: int, rounds: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 10000, (CONCURRENT, PROMPT_TOKENS), generator=draw).tolist()
    with checkpoint(dtype) as folder:
        ours, peer = Ours(folder), Peer(folder)
    equal = ours.generate(prompts[:1], 8) == peer.generate(prompts[:1], 8)
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": [], "many": []}
    for index in range(rounds):
        turns: list[tuple[str, Any]] = [("ours", ours), ("peer", peer)]
        for name, engine in turns if index % 2 else reversed(turns):
            times[name].append(step(lambda n, own=engine: own.generate(prompts[:1], n), tokens))
        times["many"].append(step(lambda n: ours.generate(prompts, n), max(1, tokens // 3)))
    ours.llm.shutdown()
    metrics: dict[str, float] = {"same_tokens": float(equal)}
    for place, clock in enumerate(("wall", "cpu")):
        own, other, many = ([t[place] for t in times[n]] for n in ("ours", "peer", "many"))
        ratios = [theirs / mine for theirs, mine in zip(other, own, strict=True)]
        metrics |= {
            f"{clock}_ratio": statistics.median(other) / statistics.median(own),
            f"{clock}_ratio_least": min(ratios),
            f"{clock}_ratio_most": max(ratios),
            f"{clock}_16_to_1": CONCURRENT * statistics.median(own) / statistics.median(many),
        }
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24, help="steps that are measured at once")
    parser.add_argument("--rounds", type=int, default=5, help="times that all is measured")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    args = parser.parse_args()
    import transformers

    records = []
    for dtype in CASES:
        settings = {
            "prompt_tokens": PROMPT_TOKENS,
            "steps": args.tokens,
            "rounds": args.rounds,
            "threads": torch.get_num_threads(),
            "transformers": transformers.__version__,
        }
        metrics = measure(dtype, args.tokens, args.rounds)
        model = f"SmolLM2-135M (random, {dtype} computed in fp32)"
        records.append(make_record("cpu_vs_transformers", metrics, model=model, settings=settings))
        gc.collect()
    print_and_append(records, args.out)


if __name__ == "__main__":
    main()
