"""Compares weights of 16, 8 and 4 bits with fp32 on this CPU, as ratios within one process.

    python bench/cpu_weights.py [--widths Qwen3-0.6B] [--layers 6] [--steps 4] [--rounds 3]
                                [--clock cpu] [--out FILE]

Checkpoints have random layers of a model's widths and a tied head of 32 000 tokens, in fp32 and in
bfloat16. The second also runs with `--quantization`. With six layers the head has its share of the
whole model. Rounds go through all engines in turns, so other work slows all of them. A decoding
step is the difference between a long answer and a short one. A prompt is an answer of one token.
Times are CPU seconds, which other programs disturb less with one thread (OMP_NUM_THREADS=1). Ratios
are fp32's seconds over an engine's within a round, with median, least and most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from cpu_vs_transformers import seconds
from quire import LLM, SamplingParams
from quire.tools.bench.record import make_record
from tables import print_and_append

WIDTHS = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "Qwen2.5-1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
SHAPE = {
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "vocab_size": 32000,
}
CASES = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
    "int4,head=int8": ("bfloat16", "int4,head=int8"),
}
"""The dtype of the checkpoint, and the quantization."""
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 16, 64
FEW = 4
CLOCKS = ("wall", "cpu")


def checkpoints(folder: Path, widths: str, layers: int) -> None:
    """Writes a checkpoint of random weights for each dtype."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, **WIDTHS[widths], num_hidden_layers=layers)
    )
    for dtype in ("float32", "bfloat16"):
        model.to(getattr(torch, dtype)).save_pretrained(folder / dtype)


def engine(folder: Path, quantization: str | None) -> LLM:
    return LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        quantization=quantization,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=FEW,
        max_num_batched_tokens=512,
        kv_cache_gb=0.2,
        enable_prefix_caching=False,
    )


def answer(llm: LLM, prompts: int, prompt_tokens: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.randint(10, 10000, (prompts, prompt_tokens), generator=draw).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate(ids, params, use_tqdm=False)


def works(llm: LLM, steps: int, clock: int) -> dict[str, Callable[[], float]]:
    """Returns the measurements by name. Each returns seconds of the clock `CLOCKS[clock]`."""

    def step(rows: int) -> float:
        short, long = (
            seconds(lambda n=n: answer(llm, rows, PROMPT_TOKENS, n))[clock] for n in (2, 2 + steps)
        )
        return (long - short) / steps

    return {
        "step": lambda: step(1),
        f"step_of_{FEW}": lambda: step(FEW),
        "prompt": lambda: seconds(lambda: answer(llm, 1, LONG_PROMPT_TOKENS, 1))[clock],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", choices=WIDTHS, default="Qwen3-0.6B", help="whose widths")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured at once")
    parser.add_argument("--rounds", type=int, default=3, help="times that all is measured")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="whose seconds count")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    args = parser.parse_args()
    engines, starts = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(Path(folder), args.widths, args.layers)
        for name, (dtype, quantization) in CASES.items():
            path = Path(folder) / dtype
            starts[name] = seconds(
                lambda name=name, path=path, how=quantization: engines.update(
                    {name: engine(path, how)}
                )
            )[1]
    clock = CLOCKS.index(args.clock)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in CASES}
    for index in range(args.rounds + 1):
        for name in list(CASES) if index % 2 else reversed(CASES):
            for work, measure in works(engines[name], args.steps, clock).items():
                spent = measure()
                if index:  # the first round warms up
                    times[name].setdefault(work, []).append(spent)
    settings = {
        "prompt_tokens": LONG_PROMPT_TOKENS,
        "layers": args.layers,
        "steps": args.steps,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
    }
    records = []
    for name in CASES:
        metrics = {"start_cpu_s": starts[name]}
        for work, spent in times[name].items():
            ratios = [a / b for a, b in zip(times["float32"][work], spent, strict=True)]
            metrics |= {
                f"{work}_ratio": statistics.median(ratios),
                f"{work}_ratio_least": min(ratios),
                f"{work}_ratio_most": max(ratios),
                f"{work}_{args.clock}_ms": 1e3 * statistics.median(spent),
            }
        model = f"{args.layers} layers of {args.widths} (random), {name}"
        records.append(make_record("cpu_weights", metrics, model=model, settings=settings))
    print_and_append(records, args.out)
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    main()
