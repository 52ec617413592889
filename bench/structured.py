"""Measures the cost of structured output: 64 streams with 64 schemas, with none, and half and half.

    python bench/structured.py                        # a GPU: Qwen3-0.6B's shape, random weights
    python bench/structured.py --tokenizer FOLDER     # with a real vocabulary of its size
    python bench/structured.py --model FOLDER --streams 4 --output-len 32   # anything else

Every timed run has schemas that were never seen before, so their compiling is part of it. Random
weights write any token that the grammar allows, which is the dearest text to follow: hardly a token
is forced.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.sampling_params import StructuredOutputsParams
from quire.tools.bench.record import make_record
from tables import print_and_append

SHAPE = Path(__file__).parent / "configs" / "qwen3-0.6b" / "config.json"
EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "quire-tiny"
PROMPT_LEN = 128


def schema(salt: int) -> dict[str, Any]:
    """One of as many as there are numbers: a list of records that never ends by itself."""
    fields: dict[str, Any] = {
        f"id_{salt}": {"type": "integer", "minimum": 0, "maximum": 10_000 + salt},
        "name": {"type": "string", "maxLength": 8 + salt % 24},
        f"state_{salt % 7}": {"enum": [f"on_{salt}", f"off_{salt}", "unknown"]},
        "when": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{3,{4 + salt % 5}}}$"},
        "score": {"type": "number", "minimum": 0, "maximum": 1 + salt},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 4},
        "owner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/owner"}]},
    }
    owner = {
        "type": "object",
        "properties": {
            "email": {"type": "string", "format": "email"},
            "admin": {"type": "boolean"},
        },
        "required": ["email", "admin"],
        "additionalProperties": False,
    }
    record = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"$defs": {"owner": owner}, "type": "array", "items": record, "minItems": 100_000}


def params(salt: int | None, length: int) -> SamplingParams:
    wanted = None
    if salt is not None:
        wanted = StructuredOutputsParams(json=json.dumps(schema(salt)))
    return SamplingParams(
        max_tokens=length, ignore_eos=True, temperature=0.8, structured_outputs=wanted
    )


class Bench:
    def __init__(self, llm: LLM, streams: int, length: int) -> None:
        self.llm = llm
        self.streams = streams
        self.length = length
        self._salt = 0

    def run(self, share: float) -> dict[str, float]:
        """share: of the streams that have schemas. Tokens per second, and what a stream without a
        schema, and one with, waits for a token."""
        with_schema = [i % 2 == 0 if share == 0.5 else share > 0 for i in range(self.streams)]
        asked = [params(self._fresh() if each else None, self.length) for each in with_schema]
        # Prompts that no run has had, so that none is found in the cache.
        draw = [(self._fresh() * 31 + i) % 5000 + 10 for i in range(self.streams)]
        prompts = [{"prompt_token_ids": [first, *range(20, 19 + PROMPT_LEN)]} for first in draw]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if tokens != self.streams * self.length:
            raise SystemExit(f"{tokens} tokens instead of {self.streams * self.length}")
        metrics = {"seconds": seconds, "output_tok_s": tokens / seconds}
        for name, wanted in (("plain_itl_ms", False), ("schema_itl_ms", True)):
            each = [o for o, has in zip(outputs, with_schema, strict=True) if has is wanted]
            if each:
                metrics[name] = statistics.mean(self._itl(output) for output in each)
        return metrics

    def _fresh(self) -> int:
        self._salt += 1
        return self._salt

    def _itl(self, output: RequestOutput) -> float:
        times = output.metrics
        if times is None or times.first_token is None or times.finished is None:
            raise SystemExit("a request has no times")
        return (times.finished - times.first_token) / (self.length - 1) * 1e3


def engine(args: argparse.Namespace, folder: Path) -> LLM:
    settings: dict[str, Any] = {"device": args.device}
    if args.model is None:
        shape = json.loads(SHAPE.read_text())
        # The ids of another tokenizer's special tokens mean nothing here.
        shape = {name: value for name, value in shape.items() if not name.endswith("token_id")}
        (folder / "config.json").write_text(json.dumps(shape))
        path = Path(args.tokenizer or EMBEDDED)
        settings["tokenizer"] = str(path.parent if path.is_file() else path)
        settings["load_format"] = "dummy"
    length = PROMPT_LEN + args.output_len + 1
    return LLM(args.model or str(folder), max_model_len=length, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id, instead of Qwen3-0.6B's shape")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json, or that file")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="append records to this JSONL file")
    args = parser.parse_args()
    shares = {"plain": 0.0, "structured": 1.0, "mixed": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(args, Path(folder))
        bench = Bench(llm, args.streams, args.output_len)
        for share in shares.values():  # buffers grow, and the tokenizer's table is built, once
            bench.run(share)
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.repeat):
            for case, share in shares.items():
                metrics = bench.run(share)
                if case not in best or metrics["seconds"] < best[case]["seconds"]:
                    best[case] = metrics
        for case in ("structured", "mixed"):
            loss = 1 - best[case]["output_tok_s"] / best["plain"]["output_tok_s"]
            best[case]["lost_percent"] = 100 * loss
        settings = {
            "streams": args.streams,
            "output_len": args.output_len,
            "tokenizer_vocab": llm.get_tokenizer().vocab_size,
        }
        records = [
            make_record(
                f"structured_{case}",
                metrics,
                model=args.model or "Qwen3-0.6B (dummy)",
                device=llm.config.device,
                settings=settings,
            )
            for case, metrics in best.items()
        ]
        llm.shutdown()
    print_and_append(records, args.out)


if __name__ == "__main__":
    main()
