"""Quire beside `transformers.generate` on this machine's CPU, as ratios within one run.

    python bench/cpu_vs_transformers.py [--tokens 64] [--out bench/results/cpu.jsonl]

SmolLM2-135M's shape with random fp32 weights. Median of three for each figure: one request at a
time in both, then 16 concurrent requests in Quire. Both share one process and its threads; the
order alternates, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quire import LLM, SamplingParams
from quire.bench.record import append_jsonl, format_table, make_record

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
    "torch_dtype": "float32",
}
PROMPT_TOKENS = 64
CONCURRENT = 16
RUNS = 3


class Peer:
    """`transformers` with random weights of the same shape: the time does not depend on values."""

    def __init__(self, config: dict[str, object]) -> None:
        import transformers

        shape = transformers.LlamaConfig(
            **{k: v for k, v in config.items() if k != "architectures"}
        )
        self.model = transformers.LlamaForCausalLM(shape).float().eval()
        self.version = transformers.__version__

    def generate(self, prompt: list[int], tokens: int) -> None:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        if out.shape[1] != len(prompt) + tokens:
            raise SystemExit("transformers stopped early")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(tokens: int) -> tuple[dict[str, float], str]:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 10000, (CONCURRENT, PROMPT_TOKENS), generator=draw).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMOLLM2_135M))
        llm = LLM(
            folder,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_cache_gb=0.5,
            enable_prefix_caching=False,
        )
    peer = Peer(SMOLLM2_135M)

    def ours(batch: list[list[int]]) -> float:
        return seconds(lambda: llm.generate(batch, params, use_tqdm=False))

    def theirs() -> float:
        return seconds(lambda: peer.generate(prompts[0], tokens))

    ours(prompts[:2])
    theirs()
    times: dict[str, list[float]] = {"one": [], "peer": [], "many": []}
    for _ in range(RUNS):
        times["one"].append(ours(prompts[:1]))
        times["peer"].append(theirs())
        times["many"].append(ours(prompts))
    one, other, many = (statistics.median(times[name]) for name in ("one", "peer", "many"))
    llm.shutdown()
    metrics = {
        "quire_tok_s": tokens / one,
        "transformers_tok_s": tokens / other,
        "quire_16_tok_s": CONCURRENT * tokens / many,
        "ratio_to_transformers": other / one,
        "ratio_16_to_1": CONCURRENT * one / many,
    }
    return metrics, peer.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    metrics, version = measure(args.tokens)
    record = make_record(
        "cpu_vs_transformers",
        metrics,
        model="SmolLM2-135M (dummy, fp32)",
        settings={
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": args.tokens,
            "threads": torch.get_num_threads(),
            "transformers": version,
        },
    )
    print(format_table([record]))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(args.out, [record])


if __name__ == "__main__":
    main()
