"""Measures the gain of the host tier when more is worth keeping than the device has room for.

    python bench/host_tier.py                                        # the embedded model, on a CPU
    python bench/host_tier.py --model bench/configs/qwen2.5-1.5b --load-format dummy \\
        --documents 48 --document-len 4096 --own-len 64 --output-len 32 --streams 16 \\
        --questions 384 --host-cache-gb 12                           # a GPU

Questions about documents, which come in random order. All documents together are `--over` times as
large as the device's pool (3 unless said), so that without another tier most of them must be
computed again each time. Both engines first see every document once; then the same questions are
timed with the tier on and off. With --chats it is conversations of several turns instead, each
of which adds to what came before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.sampling_params import SamplingParams

EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "quire-tiny"


class Session:
    """Documents, or conversations that grow, and an engine that is asked about them."""

    def __init__(self, args: argparse.Namespace, core: EngineCore) -> None:
        self._args = args
        self._core = core
        self._draw = np.random.default_rng(args.seed)
        vocab = core.config.vocab_size
        self._texts = [self._tokens(args.document_len, vocab) for _ in range(args.documents)]
        self._vocab = vocab
        self._made = 0

    def _tokens(self, count: int, vocab: int) -> list[int]:
        return self._draw.integers(0, vocab, count).tolist()

    def ask(self, order: list[int]) -> dict[str, Any]:
        """One question each about these documents, `--streams` at a time."""
        args, core = self._args, self._core
        before, waiting = core.stats(), order[::-1]
        asked: dict[str, int] = {}
        firsts: list[float] = []
        began = time.perf_counter()
        while waiting or asked:
            while waiting and len(asked) < args.streams:
                self._start(waiting.pop(), asked)
            progress = core.step()
            for place in [] if progress is None else progress.finished:
                request = progress.requests[place]  # type: ignore[union-attr]
                document = asked.pop(request.request_id.rpartition("/")[0])
                times = request.times
                firsts.append(times.first_token - times.arrival)
                if args.chats:
                    self._texts[document] = request.tokens.view().tolist()
        seconds = time.perf_counter() - began
        return self._figures(before, seconds, firsts)

    def _start(self, document: int, asked: dict[str, int]) -> None:
        args = self._args
        prompt = self._texts[document] + self._tokens(args.own_len, self._vocab)
        self._made += 1
        params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, temperature=0.0)
        total = len(prompt) + args.output_len
        self._core.add(str(self._made), int32(prompt), params, max_total=total)
        asked[str(self._made)] = document

    def _figures(self, before: Any, seconds: float, firsts: list[float]) -> dict[str, Any]:
        after = self._core.stats()
        prompts = after.prompt_tokens - before.prompt_tokens
        found: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "requests_per_s": round(len(firsts) / seconds, 2),
            "tokens_per_s": round(
                (prompts + after.generation_tokens - before.generation_tokens) / seconds, 1
            ),
            "ttft_p50_ms": round(1e3 * float(np.median(firsts)), 2),
            "hit_share": round((after.prefix_hit_tokens - before.prefix_hit_tokens) / prompts, 4),
        }
        if after.tiers is not None:
            found["host_hit_tokens"] = after.tiers.host_hit_tokens - before.tiers.host_hit_tokens
            found["blocks_out"] = after.tiers.swapped_out - before.tiers.swapped_out
            found["blocks_in"] = after.tiers.swapped_in - before.tiers.swapped_in
        return found


def measure(args: argparse.Namespace, host_cache_gb: float) -> dict[str, Any]:
    longest = args.document_len + args.own_len + args.output_len
    if args.chats:
        longest += args.questions // args.documents * (args.own_len + args.output_len) * 3
    pool = int(args.documents * args.document_len / args.over / args.block_size)
    settings: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format,
        "max_model_len": longest,
        "max_num_seqs": args.streams,
        "block_size": args.block_size,
        "num_kv_blocks": max(pool, -(-longest // args.block_size)),
        "host_cache_gb": host_cache_gb,
        "skip_tokenizer_init": True,
    }
    core = build_core(resolve(EngineArgs(**settings)))
    session = Session(args, core)
    first = session.ask(list(range(args.documents)))
    order = np.random.default_rng(args.seed + 1).integers(0, args.documents, args.questions)
    found = {"pool_blocks": settings["num_kv_blocks"], "first": first}
    found["timed"] = session.ask(order.tolist())
    core.shutdown()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--document-len", type=int, default=256)
    parser.add_argument("--own-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--over", type=float, default=3.0, help="documents over pool")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-cache-gb", type=float, default=0.5)
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file for the figures, as JSON")
    args = parser.parse_args()
    rows = {}
    for name, size in (("off", 0.0), ("on", args.host_cache_gb)):
        rows[name] = measure(args, size)
        print(name, json.dumps(rows[name]), flush=True)
    ratio = rows["on"]["timed"]["requests_per_s"] / rows["off"]["timed"]["requests_per_s"]
    print(f"host tier on / off: {ratio:.2f}")
    if args.out:
        Path(args.out).write_text(
            json.dumps({"args": vars(args), "ratio": round(ratio, 3)} | rows, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
