"""Runs Quire's benchmark cases on an installed SGLang, into records of the same form.

    python bench/vs_sglang.py bench/configs/qwen3-0.6b --case nano --case b64 --output sglang.jsonl

The same prompts, lengths and sampling as `quire bench throughput`, as in `vs_vllm.py`; random
weights, no prefix cache, no tokenizer. See vs_vllm.md.
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


class SglangEngine:
    """`sglang.Engine` behind the interface that `measure` drives."""

    def __init__(self, model: str, **settings: Any) -> None:
        from sglang import Engine

        self.engine = Engine(model_path=model, **settings)
        config = self.engine.tokenizer_manager.model_config
        self.vocab_size: int = config.vocab_size
        self.max_model_len: int = config.context_len

    def prepare(self, work: Workload) -> Callable[[], object]:
        params = [
            {"max_new_tokens": length, "ignore_eos": True, **work.sampling}
            for length in work.lengths
        ]
        return lambda: self._run(work, params)

    def _run(self, work: Workload, params: list[dict[str, Any]]) -> None:
        outputs = self.engine.generate(input_ids=work.prompts, sampling_params=params)
        made = [output["meta_info"]["completion_tokens"] for output in outputs]
        if made != work.lengths:
            raise RuntimeError("SGLang stopped before the lengths that the case asks for")

    def account(self, began: float, seconds: float) -> Metrics:
        return {}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `sglang.Engine`."""
    given: dict[str, Any] = {
        "load_format": options.load_format,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "mem_fraction_static": options.gpu_memory_utilization,
        "random_seed": 0,
    }
    if options.max_model_len is not None:
        given["context_length"] = options.max_model_len
    return given


SGLANG = peer.Peer(
    name="SGLang",
    package="sglang",
    keywords="sglang.Engine",
    script=Path(__file__).resolve(),
    settings=settings,
    build=lambda model, keywords: SglangEngine(model, **keywords),
)


if __name__ == "__main__":
    sys.exit(peer.main(SGLANG))
