"""Runs Quire's benchmark cases on an installed vLLM, into records of the same form.

    python bench/vs_vllm.py bench/configs/qwen3-0.6b --case nano --case b64 --case b1 --case ttft \\
        --output vllm.jsonl

The same prompts (token ids), lengths and sampling as `quire bench throughput`, random weights, no
prefix cache, no tokenizer. `--case startup` times the command to the first token in fresh
processes, as `quire bench startup` does, caches warm. See vs_vllm.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer
from quire.tools.bench.cases import Workload
from quire.tools.bench.gpu_meter import Metrics


class VllmEngine:
    """`vllm.LLM` behind the interface that `measure` drives."""

    def __init__(self, model: str, **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, **settings)
        config = self.llm.llm_engine.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.max_model_len: int = config.max_model_len

    def prepare(self, work: Workload) -> Callable[[], object]:
        from vllm import SamplingParams

        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **work.sampling)
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        return lambda: self._run(prompts, params, work)

    def _run(self, prompts: list[Any], params: list[Any], work: Workload) -> None:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != work.lengths:
            raise RuntimeError("vLLM stopped before the lengths that the case asks for")

    def account(self, began: float, seconds: float) -> Metrics:
        return {}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `vllm.LLM`."""
    given: dict[str, Any] = {
        "load_format": options.load_format,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "seed": 0,
    }
    if options.max_model_len is not None:
        given["max_model_len"] = options.max_model_len
    return given


VLLM = peer.Peer(
    name="vLLM",
    package="vllm",
    keywords="vllm.LLM",
    script=Path(__file__).resolve(),
    settings=settings,
    build=lambda model, keywords: VllmEngine(model, **keywords),
)


if __name__ == "__main__":
    sys.exit(peer.main(VLLM))
