"""Perplexity of a model in each format of weights and of KV, and in some that go too far.

    python bench/quantization_quality.py wikitext2.test.raw.xz --out bench/results/... [--plot FILE]
    python bench/quantization_quality.py ... --only "INT4, GPTQ" "KV: int8"   # some of the cases

`quire quantize` makes a checkpoint for a case, in a temporary folder, with the built-in text. The
engine then measures its perplexity over the given text, and its divergence from the original. Cases
that the file already has, of the same text and model, are not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineArgs
from quire.models import resolve_model_path
from quire.models.config import is_hub_id
from quire.models.files import weight_files
from quire.tools.bench import plots
from quire.tools.bench.record import append_jsonl, format_table, make_record, read_jsonl
from quire.tools.evaluate import measure_perplexity
from quire.tools.quantize import Options, Recipe, quantize
from quire.tools.quantize.recipe import Grid, Method


@dataclass(frozen=True, slots=True)
class Case:
    """A way to store a model.

    Attributes:
        recipe: of `quire quantize`; None: the checkpoint as it is.
        load: the value of `--quantization`.
        kv: the value of `--kv-cache-dtype`.
    """

    recipe: Recipe | None = None
    load: str | None = None
    kv: str = "auto"


def cases(group: int) -> dict[str, Case]:
    """Returns the cases by name. group: inputs that share a scale in 4 bits and fewer."""

    def integers(method: Method, bits: int = 4, *, symmetric: bool = True) -> Case:
        return Case(Recipe(method, Grid(bits, group=group, symmetric=symmetric)))

    recipes = {
        "FP8, weights only": Case(Recipe.with_defaults("fp8", weight_only=True)),
        "INT8, weights only": Case(Recipe.with_defaults("int8", weight_only=True)),
        "FP8": Case(Recipe.with_defaults("fp8")),
        "W8A8": Case(Recipe.with_defaults("int8")),
        "W8A8, SmoothQuant": Case(Recipe.with_defaults("smoothquant")),
        "INT4, GPTQ": integers("gptq"),
        "INT4, GPTQ, zeros": integers("gptq", symmetric=False),
        "INT4, AWQ": integers("awq", symmetric=False),
        "INT4, nearest": integers("rtn"),
        "W8A8, one fixed scale of inputs": Case(Recipe("int8", Grid(8), "tensor")),
        "INT3, GPTQ": integers("gptq", 3),
        "INT3, nearest": integers("rtn", 3),
        "INT2, GPTQ": integers("gptq", 2),
        "INT2, nearest": integers("rtn", 2),
    }
    loads = ("int8", "fp8", "w8a8", "w8a8_fp8", "int4", "head=int8", "head=fp8", "int4,head=int8")
    at_load = {f"at load: {load}": Case(load=load) for load in loads}
    kv = {f"KV: {kind}": Case(kv=kind) for kind in ("fp8", "fp8_dynamic", "int8")}
    return {**recipes, **at_load, **kv}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", type=Path, help="UTF-8 text, or the same in .xz")
    parser.add_argument("--model", help="folder or hub id; left out: the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--group-size", type=int, default=64, help="0: a scale for each output")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--limit", type=int, default=10_000, help="tokens of the text")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="measure these cases alone")
    parser.add_argument("--kv-cache-gb", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    folder = resolve_model_path(args.model)
    name = args.model if args.model and is_hub_id(args.model) else folder.name
    known = read_jsonl(args.out) if args.out.exists() else []
    done = {
        record.case
        for record in known
        if record.settings["text"] == args.text.name and record.model == name
    }
    settings = {
        "text": args.text.name, "group_size": args.group_size, "samples": args.samples,
        "length": args.length, "window": args.window,
    }  # fmt: skip
    wanted = cases(args.group_size)
    for only in args.only or ():
        if only not in wanted:
            parser.error(f"no case is named {only!r}; known are: {', '.join(wanted)}")
    for case in args.only or wanted:
        if case in done:
            continue
        metrics = measure(wanted[case], folder, args)
        record = make_record(case, metrics, model=name, device=args.device, settings=settings)
        append_jsonl(args.out, [record])
        print(format_table([record]).splitlines()[-1], flush=True)
    records = [record for record in read_jsonl(args.out) if record.model == name]
    print(format_table(records))
    if args.plot is not None:
        plots.quality(records, args.plot)


def measure(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Returns perplexities, the KL divergence in nats, bytes of the checkpoint's files, and the
    seconds that making it took."""
    with tempfile.TemporaryDirectory() as temporary:
        model, seconds = folder, 0.0
        if case.recipe is not None:
            model = Path(temporary) / "model"
            options = Options(
                samples=args.samples, length=args.length, force=True, device=args.device
            )
            began = time.perf_counter()
            quantize(folder, folder.name, model, case.recipe, options)
            seconds = time.perf_counter() - began
        found = measure_perplexity(
            EngineArgs(
                model=str(model), device=args.device, quantization=case.load,
                kv_cache_dtype=case.kv, kv_cache_gb=args.kv_cache_gb,
                enforce_eager=True,
            ),
            args.text, base=str(folder), window=args.window, limit=args.limit,
        )  # fmt: skip
        size = sum(file.stat().st_size for file in weight_files(model))
    base = found.base or found
    return {
        "perplexity": found.perplexity,
        "base_perplexity": base.perplexity,
        "change_percent": 100 * (found.perplexity / base.perplexity - 1),
        "kl": found.kl or 0.0,
        "tokens": float(found.tokens),
        "bytes": float(size),
        "quantize_seconds": seconds,
    }


if __name__ == "__main__":
    main()
