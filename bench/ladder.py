"""Climbs from a loop that recomputes everything to the whole engine, one rung at a time.

    python bench/ladder.py                                       # quire-tiny, on this machine's CPU
    python bench/ladder.py --device cuda --out bench/results/h200_ladder.jsonl    # a GPU
    python bench/ladder.py bench/configs/gpt2 --device cuda --tables              # GPT-2's tables
    python bench/ladder.py --device cuda --only qwen3-0.6b --seconds 180      # one of the four

Every rung serves the same requests: on a GPU 256, with answers of 128 to 384 tokens. Prompts share
a beginning, have different lengths and arrive one after the other. The first rungs are
`bench/baselines`, on a GPU captured in CUDA graphs; those that serve one request at a time serve
the first few only, because their speed does not depend on the number. The others are the engine
with more and more switches on. A rung's tokens are compared with the first rung's; some rungs may
change them. Rungs that need a GPU, fail or take too long are named and left out. On a CPU only
ratios are recorded. Random weights soon repeat themselves, so lookup drafts gain more than on real
text.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.models import (
    build_model,
    load_config,
    load_weights,
    resolve_model_path,
    spec_from_config,
)
from quire.sampling_params import SamplingParams
from quire.tools.bench.record import BenchRecord, append_jsonl, format_table, make_record

sys.path.insert(0, str(Path(__file__).parent / "baselines"))
from batching import Clock, Job, cached, continuous, naive, static
from graphed_model import GraphedModel
from plain_model import PlainModel

import ladder_report

CONFIGS = Path(__file__).parent / "configs"
MODELS = ("qwen3-0.6b", "smollm2-135m", "gpt2", "qwen2.5-1.5b")
"""Measured on a GPU unless others are named."""
USERS = 1, 2, 4, 8, 16, 32, 64, 128
BLOCK = 16
NAIVE = "naive recompute"
RATIOS = ("to_naive", "to_before", "same_texts", "ratio", "to_one", "longest_percent")
Runner = Callable[[PlainModel, Sequence[Job], Clock], None]


@dataclass(frozen=True)
class Rung:
    """A way to serve the requests: a baseline, or the engine.

    Attributes:
        settings: added to the settings of the earlier rungs.
        on: optimizations that this rung and later ones enable.
        gpu: the rung needs a GPU to mean anything.
        exact: the tokens must stay the same.
        alone: it serves one request at a time.
    """

    name: str
    baseline: Runner | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    on: tuple[str, ...] = ()
    gpu: bool = False
    exact: bool = True
    alone: bool = False


def rungs(slots: int, budget: int, draft: str | None) -> list[Rung]:
    """Returns the rungs, for batches of `slots` rows and steps of `budget` tokens."""
    speculative = {"method": "suffix"} if draft is None else {"model": draft}
    return [
        Rung(NAIVE, naive, alone=True),
        Rung("KV cache", cached, alone=True),
        Rung("static batch", lambda model, jobs, clock: static(model, jobs, clock, size=slots)),
        Rung(
            "time-window batch",
            lambda model, jobs, clock: static(model, jobs, clock, size=slots, window=0.05),
        ),
        Rung(
            "continuous, contiguous KV",
            lambda model, jobs, clock: continuous(model, jobs, clock, slots=slots),
        ),
        Rung("paged"),
        Rung(
            "chunked prefill",
            settings={"enable_chunked_prefill": True, "max_num_batched_tokens": budget},
        ),
        Rung("graphs", on=("graphs",), gpu=True),
        Rung("kernels", on=("fusions", "skinny", "pdl"), gpu=True),
        Rung("overlap", settings={"steps_in_flight": 2}, on=("overlap",)),
        Rung("prefix cache", settings={"enable_prefix_caching": True}),
        Rung("8-bit KV", settings={"kv_cache_dtype": "int8"}, exact=False),
        Rung("quantized", settings={"quantization": "int8"}, exact=False),
        Rung("speculation", settings={"speculative": speculative}, exact=False),
    ]


def requests(
    count: int, shared: int, own: tuple[int, int], length: tuple[int, int], span: float, vocab: int
) -> list[Job]:
    """Prompts that begin alike, which arrive evenly over `span` seconds."""
    draw = random.Random(0)

    def ids(size: int) -> list[int]:
        return [draw.randint(10, min(10_000, vocab - 1)) for _ in range(size)]

    beginning = ids(shared)
    return [
        Job([*beginning, *ids(draw.randint(*own))], draw.randint(*length), span * i / count)
        for i in range(count)
    ]


def serve(
    settings: dict[str, Any],
    jobs: Sequence[Job],
    device: torch.device,
    *,
    repeats: int = 1,
    limit: float = math.inf,
) -> tuple[list[Job], Clock]:
    """Runs an engine over the requests, after two small ones to warm up. Returns the fastest run's
    requests and its clock.

    Raises:
        TimeoutError: a run takes longer than `limit` seconds.
    """
    core = build_core(resolve(EngineArgs(**settings)))
    try:
        run(core, [Job(job.prompt, 3) for job in jobs[:2]], device, limit)
        runs = (run(core, jobs, device, limit) for _ in range(repeats))
        return min(runs, key=lambda found: found[1].now)
    finally:
        core.shutdown()


def run(
    core: Any, jobs: Sequence[Job], device: torch.device, limit: float
) -> tuple[list[Job], Clock]:
    """Runs an engine over requests. Returns them with their tokens, and the clock."""
    own, clock = fresh(jobs), Clock(device, limit)
    # No run may find what another one left.
    core.scheduler.reset_prefix_cache()
    _drive(core, own, clock)
    return own, clock


def fresh(jobs: Sequence[Job]) -> list[Job]:
    return [replace(job, output=[], times=[]) for job in jobs]


def _drive(core: Any, jobs: Sequence[Job], clock: Clock) -> None:
    left, running = list(enumerate(jobs)), {}
    while left or running:
        if not running:
            clock.wait_until(left[0][1].arrival)
        while left and left[0][1].arrival <= clock.now:
            number, job = left.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=job.length, ignore_eos=True)
            core.add(str(number), int32(job.prompt), params, max_total=job.total)
            running[f"{number}/0"] = job
        # The step has copied its results by then, although the next one may be running.
        for item in clock.run(core.step, settle=False) or ():
            job = running[item.request.request_id]
            job.output += item.new_tokens.tolist()
            job.times += [clock.now] * len(item.new_tokens)
            if item.finished:
                del running[item.request.request_id]
    while core.has_work():
        core.step()


def figures(jobs: Sequence[Job], clock: Clock) -> dict[str, float]:
    first = [job.times[0] - job.arrival for job in jobs]
    gaps = sorted(b - a for job in jobs for a, b in zip(job.times, job.times[1:], strict=False))
    found = {
        "output_tok_s": sum(len(job.output) for job in jobs) / clock.now,
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "itl_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    }
    if torch.cuda.is_available():
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def load_plain(path: Path, args: argparse.Namespace) -> PlainModel:
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    # cuDNN would make a plan for every new length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    decoder = build_model(spec_from_config(load_config(path)), device=args.device, dtype=dtype)
    load_weights(decoder, path, _format(path))
    plain = PlainModel(decoder)
    return plain if args.device == "cpu" else GraphedModel(plain)


def _format(path: Path) -> str:
    return "auto" if any(path.glob("*.safetensors")) else "dummy"


def plain_settings(path: Path, args: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, Any]:
    """Returns the settings of an engine with just enough room, and little switched on."""
    return {
        "model": str(path), "load_format": _format(path), "device": args.device,
        "skip_tokenizer_init": True, "max_num_seqs": args.slots,
        "max_model_len": max(job.total for job in jobs), "steps_in_flight": 1,
        "max_num_batched_tokens": max(args.budget, *(job.total for job in jobs)),
        "num_kv_blocks": sum(-(-job.total // BLOCK) + 1 for job in jobs), "block_size": BLOCK,
        "enable_prefix_caching": False, "enable_chunked_prefill": False,
    }  # fmt: skip


def climb(path: Path, args: argparse.Namespace) -> Iterator[BenchRecord]:
    """Yields the record of each rung that runs here."""
    spec, device = spec_from_config(load_config(path)), torch.device(args.device)
    jobs = requests(args.requests, args.shared, args.own, args.length, args.span, spec.vocab_size)
    settings = plain_settings(path, args, jobs)
    off = {"graphs", "overlap", "fusions", "skinny", "pdl"}
    plain: PlainModel | None = load_plain(path, args)
    reference: list[list[int]] = []
    speeds: dict[str, float] = {}
    for rung in rungs(args.slots, args.budget, args.draft):
        settings |= rung.settings
        off -= set(rung.on)
        if rung.gpu and device.type == "cpu":
            print(f"{rung.name}: skipped, needs a GPU", flush=True)
            continue
        if rung.baseline is None and plain is not None:
            plain = None
            gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        limit = min(args.limit, args.end - time.monotonic())
        try:
            if limit <= 0:
                raise TimeoutError("no time")
            if rung.baseline is not None and plain is not None:
                served = jobs[: args.alone] if rung.alone else jobs
                own, clock = fresh(served), Clock(device, limit)
                if isinstance(plain, GraphedModel):
                    rows = 1 if rung.alone else args.slots
                    plain.capture(rows, max(job.total for job in jobs))
                # The first call on a device makes what later ones find.
                rung.baseline(plain, [Job(jobs[0].prompt, 2)], Clock(device, limit))
                rung.baseline(plain, own, clock)
            else:
                on = {**settings, "disable": tuple(sorted(off))}
                own, clock = serve(on, jobs, device, repeats=args.repeats, limit=limit)
        except Exception as error:
            # One rung's failure says nothing of the others.
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
            args.failed.append(f"{path.name}, {rung.name}: {type(error).__name__}: {error}")
            continue
        best = figures(own, clock)
        outputs = [job.output for job in own]
        reference = reference or outputs
        speeds[rung.name] = best["output_tok_s"]
        # A rung that serves one request at a time has the outputs of the first few.
        pairs = list(zip(outputs, reference, strict=False))
        same = sum(a == b for a, b in pairs) / len(pairs)
        if rung.exact and device.type == "cpu" and same < 1.0:
            raise SystemExit(f"{rung.name}: {same:.0%} of the texts are those of the first rung")
        *before, last = speeds.values()
        ratios = {"to_before": last / (before or [last])[-1], "same_texts": same}
        if NAIVE in speeds:
            ratios["to_naive"] = last / speeds[NAIVE]
        yield make_record(
            f"ladder:{rung.name}",
            {**best, **ratios},
            model=path.name,
            device=args.device,
            settings={
                "requests": args.requests, "shared": args.shared, "own": args.own,
                "length": args.length, "span": args.span, "slots": args.slots,
                "budget": args.budget, "alone": args.alone, "graphs": device.type == "cuda",
            },
        )  # fmt: skip


def tables(path: Path, args: argparse.Namespace) -> Iterator[BenchRecord]:
    """Yields the comparisons that GPT-2 engines publish: the cache by lengths, batches by size."""
    for name, compare in comparisons(path, args):
        try:
            if time.monotonic() > args.end:
                raise TimeoutError("no time")
            record = compare()
        except Exception as error:
            # One table's failure says nothing of the others.
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
            args.failed.append(f"{path.name}, {name}: {type(error).__name__}: {error}")
            continue
        yield msgspec.structs.replace(record, case=name, model=path.name)


def comparisons(
    path: Path, args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], BenchRecord]]]:
    """Yields the names of the comparisons, and what measures them."""
    plain, device = load_plain(path, args), torch.device(args.device)
    vocab, longest = plain.decoder.spec.vocab_size, plain.decoder.spec.max_positions

    def measure(run: Runner, count: int, prompt: int, length: int) -> dict[str, float]:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        jobs = requests(count, 0, (prompt, prompt), (length, length), 0.0, vocab)
        if isinstance(plain, GraphedModel):
            plain.capture(1 if run in (naive, cached) else count, prompt + length)
        clock = Clock(device, args.limit)
        run(plain, jobs, clock)
        return figures(jobs, clock)

    def record(metrics: dict[str, float], **settings: Any) -> BenchRecord:
        settings["graphs"] = device.type == "cuda"
        return make_record("", metrics, device=args.device, settings=settings)

    def cache(prompt: int, length: int) -> BenchRecord:
        found = [measure(run, 1, prompt, length)["output_tok_s"] for run in (naive, cached)]
        names = ("recompute_tok_s", "cache_tok_s")
        return record({**dict(zip(names, found, strict=True)), "ratio": found[1] / found[0]})

    def batch(size: int) -> BenchRecord:
        found = measure(lambda *work: static(*work, size=size), size, 16, 48)
        alone = measure(cached, 1, 16, 48)["output_tok_s"]
        return record({**found, "to_one": found["output_tok_s"] / alone})

    def kernels(run: Runner) -> BenchRecord:
        spent = profiled(lambda: measure(run, 1, 16, 64), device)
        longest = sorted(spent, key=lambda key: -spent[key])[:3]
        total = sum(spent.values())
        share = 100 * spent[longest[0]] / total
        return record({"kernels_ms": total / 1e3, "longest_percent": share}, longest=longest)

    measure(cached, 1, 8, 4)
    lengths = [(16, out) for out in (200, 500, 1000)] + [(size, 48) for size in (64, 256, 512)]
    for prompt, length in lengths:
        if prompt + length <= longest:
            yield f"cache:{prompt}+{length}", functools.partial(cache, prompt, length)
    for size in (1, 8, 128, 512):
        yield f"static:{size}", functools.partial(batch, size)
    for name, run in (("recompute", naive), ("cache", cached)):
        yield f"kernels:{name}", functools.partial(kernels, run)
    alone = measure(cached, 2, 16, 48)["output_tok_s"]
    for name, compare in users(path, args, vocab):
        yield name, lambda compare=compare: record(_to_one(compare(), alone))


def users(
    path: Path, args: argparse.Namespace, vocab: int
) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Yields what measures the engine with 1 to 128 users at once, by name."""
    device = torch.device(args.device)
    every = requests(USERS[-1], 0, (16, 16), (48, 48), 0.0, vocab)
    on = {
        "enable_chunked_prefill": True, "steps_in_flight": 2, "max_num_seqs": USERS[-1],
        "max_num_batched_tokens": 2048,
    }  # fmt: skip
    core = build_core(resolve(EngineArgs(**{**plain_settings(path, args, every), **on})))

    def measure(count: int) -> dict[str, float]:
        runs = (run(core, every[:count], device, args.limit) for _ in range(args.repeats))
        return figures(*min(runs, key=lambda found: found[1].now))

    try:
        run(core, every[:2], device, args.limit)
        for count in USERS:
            yield f"users:{count}", functools.partial(measure, count)
    finally:
        core.shutdown()


def _to_one(found: dict[str, float], alone: float) -> dict[str, float]:
    return {**found, "to_one": found["output_tok_s"] / alone}


def profiled(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Returns the µs that kernels took on the device, by name: products of matrices become products
    with a vector once keys and values are kept.

    Raises:
        RuntimeError: the profiler saw none.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        work()
    name = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    own = "CPU" if device.type == "cpu" else "CUDA"
    spent = {
        event.key: float(getattr(event, name))
        for event in profile.key_averages()
        # What launches a kernel is charged for it as well.
        if event.device_type.name == own
    }
    if not any(spent.values()):
        raise RuntimeError("the profiler saw no kernels")
    return spent


def recorded(record: BenchRecord, device: str) -> BenchRecord:
    """Returns the metrics to keep. A CPU keeps ratios only, because its speeds mean nothing
    elsewhere."""
    if device != "cpu":
        return record
    kept = {name: value for name, value in record.metrics.items() if name in RATIOS}
    return msgspec.structs.replace(record, metrics=kept)


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="folders; a config.json alone: random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, help="default: 8, and 256 on a GPU")
    parser.add_argument("--slots", type=int, help="rows of a batch; default: 4, and 256 on a GPU")
    parser.add_argument("--alone", type=int, help="requests of rungs that serve one at a time")
    parser.add_argument("--shared", type=int, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=_pair, metavar="LOW-HIGH", help="tokens of their own")
    parser.add_argument("--length", type=_pair, metavar="LOW-HIGH", help="tokens of an answer")
    parser.add_argument("--budget", type=int, help="tokens of a step where prompts are cut")
    parser.add_argument("--span", type=float, default=0.5, help="seconds in which all arrive")
    parser.add_argument("--draft", help="a draft model; without one, drafts are looked up")
    parser.add_argument("--repeats", type=int, help="runs of the engine, of which the best counts")
    parser.add_argument("--only", metavar="MODEL", help="models whose folder has this in its name")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing after this")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of one rung's run")
    parser.add_argument("--tables", action="store_true", help="the cache and batches by size")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    args = parser.parse_args(arguments)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    small = args.device == "cpu"
    for name, on_cpu, on_gpu in (
        ("requests", 8, 256), ("slots", 4, 256), ("shared", 32, 256), ("own", (8, 32), (64, 256)),
        ("length", (8, 24), (128, 384)), ("budget", 64, 2048), ("repeats", 1, 2),
        ("alone", 8, 4),
    ):  # fmt: skip
        if getattr(args, name) is None:
            setattr(args, name, on_cpu if small else on_gpu)
    args.failed, args.end, records = [], time.monotonic() + args.seconds, []
    models = args.models or ([None] if small else [str(CONFIGS / name) for name in MODELS])
    for model in models:
        path = resolve_model_path(model)
        if args.only and args.only not in path.name:
            continue
        for record in (tables if args.tables else climb)(path, args):
            records.append(record)
            if args.out is not None:
                append_jsonl(args.out, [recorded(record, args.device)])
            print(
                format_table([record]).splitlines()[-1],
                *record.settings.get("longest", ()),
                flush=True,
            )
    print(format_table(records))
    if args.plot is not None and not args.tables:
        ladder_report.plot(records, args.plot)
    print(f"{len(args.failed)} failures" + "".join(f"\n  {line}" for line in args.failed))
    return 1 if args.failed else 0


if __name__ == "__main__":
    sys.exit(main())
