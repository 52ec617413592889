"""Measures the cost of structured output against the same engine without schemas, in turns.

    python bench/structured.py --tokenizer FOLDER           # a GPU: Qwen3-0.6B's shape
    python bench/structured.py --tokenizer FOLDER --streams 1,16,64,256 --output-len 128,256,512
    python bench/structured.py --tokenizer FOLDER --cpus 4  # the engine and its threads on 4 cores
    python bench/structured.py --tokenizer FOLDER --trace trace.jsonl      # where the time goes
    python bench/structured.py --model FOLDER --streams 4 --output-len 32  # anything else

Cases: `plain` has no schemas. `new` has a schema per stream that no run has had, so compiling is
part of it. `repeated` has one agent's tools in all streams, and runs before have had them. `mixed`
is half `new` and half `plain`. The weights are random, unless `--model` names real ones.

`documents` and `free` play back calls of an agent's tools, with and without their schema
(`structured_documents.py`). They need an engine of their own: `--cases documents,free`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.features.structured_output.stats import GrammarStats
from quire.outputs import RequestOutput
from quire.sampling_params import StructuredOutputsParams
from quire.tools.bench.record import BenchRecord, append_jsonl, card_name, make_record
from structured_loads import NEW, agent_tools
from tables import print_and_append

SHAPE = Path(__file__).parent / "configs" / "qwen3-0.6b" / "config.json"
EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded" / "quire-tiny"
PROMPT_LEN = 128
CASES = ("plain", "new", "repeated", "mixed")
PLAYBACK = ("documents", "free")
TOOLS = json.dumps(agent_tools())
_FIRST_ID, _IDS = 10, 2000
"""Token ids that prompts begin with."""


class Bench:
    """Runs cases on one engine.

    Args:
        load: Name of the load of new schemas.
    """

    def __init__(self, llm: LLM, load: str) -> None:
        self.llm = llm
        self._schema = NEW[load]
        self._salt = 0
        self._prompts = 0
        self._played: dict[str, float] = {}
        self._documents: set[tuple[int, ...]] = set()
        self.asked: list[StructuredOutputsParams | None] = []
        self.outputs: list[RequestOutput] = []

    def play(self, streams: int, length: int) -> None:
        """Lets the oracle write documents in the runs to come."""
        # It needs PyTorch, and `--cpus` must come before that is imported.
        from structured_documents import oracle, written

        documents = written(self.llm.config, TOOLS, streams, length)
        oracle().write(documents.tokens, PROMPT_LEN)
        self._played = {"forced_percent": 100 * documents.forced}
        self._documents = {tuple(tokens) for tokens in documents.tokens}

    def run(self, case: str, streams: int, length: int) -> dict[str, float]:
        """Runs a case once. Returns its metrics."""
        self.asked = [self._wanted(case, i) for i in range(streams)]
        params = [
            SamplingParams(
                max_tokens=length, ignore_eos=True, temperature=0.8, structured_outputs=each
            )
            for each in self.asked
        ]
        prompts = [{"prompt_token_ids": self._prompt()} for _ in range(streams)]
        before = self.llm.stats()
        start = time.perf_counter()
        self.outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        after = self.llm.stats()
        tokens = sum(len(output.outputs[0].token_ids) for output in self.outputs)
        if tokens != streams * length:
            raise SystemExit(f"case {case}: {tokens} tokens instead of {streams * length}")
        steps = after.steps - before.steps
        metrics = {"seconds": seconds, "output_tok_s": tokens / seconds, "steps": float(steps)}
        if case in PLAYBACK:
            metrics |= self._played
            texts = {tuple(output.outputs[0].token_ids) for output in self.outputs}
            if not texts <= {document[:length] for document in self._documents}:
                raise SystemExit(f"case {case}: a text is none of the documents")
        for name, wanted in (("plain", False), ("schema", True)):
            each = [
                output
                for output, asked in zip(self.outputs, self.asked, strict=True)
                if (asked is not None) is wanted
            ]
            if each:
                metrics[f"{name}_itl_ms"] = statistics.mean(_itl(output) for output in each)
                metrics[f"{name}_ttft_ms"] = statistics.median(_ttft(output) for output in each)
        masked = sum(asked is not None for asked in self.asked) * length
        if masked:
            late = after.late_rows - before.late_rows
            now, then = after.grammars, before.grammars or GrammarStats()
            compiling = now.compile_late_rows - then.compile_late_rows
            metrics["late_percent"] = 100 * (late - compiling) / (masked + late)
            metrics["compile_late_percent"] = 100 * compiling / (masked + late)
            metrics["compile_ms"] = 1e3 * (now.compile_seconds - then.compile_seconds)
            if lookups := now.mask_lookups - then.mask_lookups:
                metrics["mask_hit_percent"] = 100 * (now.mask_hits - then.mask_hits) / lookups
        return metrics

    def _wanted(self, case: str, stream: int) -> StructuredOutputsParams | None:
        if case in ("plain", "free") or (case == "mixed" and stream % 2):
            return None
        if case in ("repeated", "documents"):
            return StructuredOutputsParams(json=TOOLS)
        self._salt += 1
        return StructuredOutputsParams(json=json.dumps(self._schema(self._salt)))

    def _prompt(self) -> list[int]:
        """Returns a prompt that no run has had, so that none is found in the cache."""
        self._prompts += 1
        first, second = self._prompts % _IDS, self._prompts // _IDS
        return [_FIRST_ID + first, _FIRST_ID + second, *range(20, 18 + PROMPT_LEN)]


def _times(output: RequestOutput) -> tuple[float, float, float]:
    times = output.metrics
    if times is None or times.first_token is None or times.finished is None:
        raise SystemExit("a request has no times")
    return times.arrival, times.first_token, times.finished


def _itl(output: RequestOutput) -> float:
    _, first, finished = _times(output)
    return (finished - first) / max(1, len(output.outputs[0].token_ids) - 1) * 1e3


def _ttft(output: RequestOutput) -> float:
    """Returns ms."""
    arrival, first, _ = _times(output)
    return (first - arrival) * 1e3


def hold(cpus: int) -> None:
    """Holds this process, all its threads and those to come to so many cores."""
    cores = sorted(os.sched_getaffinity(0))[:cpus]
    if len(cores) < cpus:
        raise SystemExit(f"--cpus {cpus}: this machine lends {len(cores)} cores")
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def write_shape(folder: Path) -> None:
    """Writes the config.json of Qwen3-0.6B's shape, for random weights."""
    shape = json.loads(SHAPE.read_text())
    # The ids of another tokenizer's special tokens mean nothing here.
    shape = {name: value for name, value in shape.items() if not name.endswith("token_id")}
    (folder / "config.json").write_text(json.dumps(shape))


def engine(args: argparse.Namespace, folder: Path) -> LLM:
    settings: dict[str, Any] = {"device": args.device, **json.loads(args.settings)}
    if args.model is None:
        write_shape(folder)
        path = Path(args.tokenizer or EMBEDDED)
        settings["tokenizer"] = str(path.parent if path.is_file() else path)
        settings["load_format"] = "dummy"
    settings.setdefault("max_model_len", PROMPT_LEN + max(args.output_len) + 1)
    settings.setdefault("max_num_seqs", max(args.streams))
    return LLM(args.model or str(folder), **settings)


def measure(bench: Bench, args: argparse.Namespace, streams: int, length: int) -> dict[str, Any]:
    """Runs all cases in turns. Returns the metrics of each case's best run."""
    for case in args.cases:  # buffers grow, and what all grammars share is built, once
        bench.run(case, streams, min(length, 64))
    rounds: dict[str, list[dict[str, float]]] = {case: [] for case in args.cases}
    for _ in range(args.repeat):
        for case in args.cases:
            rounds[case].append(bench.run(case, streams, length))
    best = {case: min(runs, key=lambda run: run["seconds"]) for case, runs in rounds.items()}
    plain = best.get("plain", best.get("free"))
    for case, runs in rounds.items():
        speeds = [run["output_tok_s"] for run in runs]
        best[case]["median_tok_s"] = statistics.median(speeds)
        if plain is not None and best[case] is not plain:
            best[case] |= _losses(best[case], plain)
    return best


def _losses(run: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """Returns what a run has lost against a plain one: in all, until its first tokens, where
    grammars are compiled, and by masks from then on."""
    found = {"lost_percent": 100 * (1 - run["output_tok_s"] / plain["output_tok_s"])}
    if "plain_itl_ms" in run:
        found["plain_rows_lost_percent"] = 100 * (run["plain_itl_ms"] / plain["plain_itl_ms"] - 1)
    if "schema_itl_ms" in run:
        later = run["schema_ttft_ms"] - plain["plain_ttft_ms"]
        found["compile_lost_percent"] = 100 * later / (1e3 * plain["seconds"])
        found["masks_lost_percent"] = 100 * (run["schema_itl_ms"] / plain["plain_itl_ms"] - 1)
    return found


def trace(bench: Bench, args: argparse.Namespace, streams: int, length: int) -> list[BenchRecord]:
    """Runs each case once more under the recorder, and writes its steps to the file."""
    # It needs PyTorch, and `--cpus` must come before that is imported.
    from structured_trace import HostRecorder, kernel_waits, replay

    found = []
    for case in args.cases:
        recorder = HostRecorder(bench.llm)
        try:
            metrics = bench.run(case, streams, length)
            run = recorder.take()
        finally:
            recorder.close()
        metrics |= run.metrics()
        asked = [each for each in bench.asked if each is not None]
        rows = zip(bench.outputs, bench.asked, strict=True)
        outputs = [output for output, each in rows if each is not None]
        costs = replay(bench.llm, asked, outputs) if asked else None
        if costs is not None:
            metrics |= costs.metrics()
        if bench.llm.config.device.startswith("cuda"):
            metrics |= kernel_waits(partial(bench.run, case, streams, length))
        found.append(record(bench, args, f"structured_trace_{case}", metrics, streams, length))
        steps = [
            {
                "case": case,
                "streams": streams,
                "output_len": length,
                "step": i,
                "rows": step.rows,
                "masks_us": 1e6 * step.masks,
                "row_us": 1e6 * step.row,
                "slowest_us": 1e6 * step.slowest,
            }
            for i, step in enumerate(run.steps)
        ]
        for i, step in enumerate(steps):
            if costs is not None and i < costs.first.shape[1]:
                row = costs.first[:, i]
                step |= {"slowest_row_us": row.max(), "slowest_row": int(row.argmax())}
                step |= {"cold": int((row > 30 + 2 * costs.second[:, i]).sum())}
        with args.trace.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(step) + "\n" for step in steps)
    return found


def show(traces: Sequence[BenchRecord]) -> None:
    """Prints traces as a table: a row per metric, a column per case."""
    names = dict.fromkeys(name for each in traces for name in each.metrics)
    width = max(map(len, names), default=0)
    print(" " * width, *(each.case.removeprefix("structured_trace_").rjust(10) for each in traces))
    for name in names:
        cells = [
            f"{each.metrics[name]:10.1f}" if name in each.metrics else " " * 10 for each in traces
        ]
        print(name.ljust(width), *cells)


def record(
    bench: Bench,
    args: argparse.Namespace,
    case: str,
    metrics: dict[str, float],
    streams: int,
    length: int,
) -> BenchRecord:
    settings = {
        "streams": streams,
        "output_len": length,
        "load": args.load,
        "tokenizer_vocab": bench.llm.get_tokenizer().vocab_size,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": card_name("cpu"),
        **json.loads(args.settings),
    }
    model = args.model or "Qwen3-0.6B (dummy)"
    return make_record(
        case, metrics, model=model, device=bench.llm.config.device, settings=settings
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _cases(text: str) -> list[str]:
    cases = text.split(",")
    for case in cases:
        if case not in CASES + PLAYBACK:
            raise argparse.ArgumentTypeError(f"{case!r} is none of {', '.join(CASES + PLAYBACK)}")
    if len({case in PLAYBACK for case in cases}) > 1:
        raise argparse.ArgumentTypeError(f"{', '.join(PLAYBACK)} need an engine of their own")
    return cases


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id, instead of Qwen3-0.6B's shape")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json, or that file")
    parser.add_argument("--streams", type=_numbers, default=[64], metavar="N,...")
    parser.add_argument("--output-len", type=_numbers, default=[256], metavar="N,...")
    parser.add_argument("--cases", type=_cases, default=list(CASES), metavar="CASE,...")
    parser.add_argument("--load", choices=list(NEW), default="tickets", help="new schemas")
    parser.add_argument("--repeat", type=int, default=4, help="rounds of all cases")
    parser.add_argument("--cpus", type=int, help="cores for the engine and its threads")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace a run of each case; append its steps"
    )
    parser.add_argument("--settings", default="{}", help="further settings of the engine, JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="append records to this JSONL file")
    return parser


def main() -> None:
    args = parser().parse_args()
    if args.cpus is not None:
        hold(args.cpus)
    for path in (args.trace, args.out):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    playback = args.cases[0] in PLAYBACK
    with tempfile.TemporaryDirectory() as folder:
        if playback:
            # It needs PyTorch, and `--cpus` must come before that is imported.
            from structured_documents import install

            install()
        llm = engine(args, Path(folder))
        bench = Bench(llm, args.load)
        for streams in args.streams:
            for length in args.output_len:
                if playback:
                    bench.play(streams, length)
                best = measure(bench, args, streams, length) if args.repeat else {}
                records = [
                    record(bench, args, f"structured_{case}", metrics, streams, length)
                    for case, metrics in best.items()
                ]
                print(f"\n{streams} streams, {length} tokens, {args.load}", flush=True)
                if records:
                    print_and_append(records, args.out)
                if args.trace is not None:
                    traces = trace(bench, args, streams, length)
                    show(traces)
                    if args.out is not None:
                        append_jsonl(args.out, traces)
        llm.shutdown()


if __name__ == "__main__":
    main()
