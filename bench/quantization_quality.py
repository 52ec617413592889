"""Perplexity of a model in each format that `quire quantize` and `--quantization` make, and in some
that go too far.

    python bench/quantization_quality.py wikitext2.test.raw.xz --out bench/results/... [--plot FILE]

A checkpoint is made for each case, in a temporary folder, with the built-in text; then its
perplexity over the given text, and its divergence from the original, are measured through the
engine. Cases that the file has already, of the same text and model, are not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from quire.config import EngineArgs
from quire.models import resolve_model_path
from quire.models.config import is_hub_id
from quire.tools.bench import plots
from quire.tools.bench.record import append_jsonl, format_table, make_record, read_jsonl
from quire.tools.evaluate import Perplexity, measure_perplexity
from quire.tools.quantize import Options, Recipe, quantize
from quire.tools.quantize.recipe import Grid


def cases(group: int) -> dict[str, Recipe | str]:
    """Returns recipes, and values of `--quantization`, by what they are called."""

    def integers(method: str, bits: int = 4, *, symmetric: bool = True) -> Recipe:
        grid = Grid(bits, group=group, symmetric=symmetric)
        return Recipe(Recipe.with_defaults(method).method, grid)

    return {
        "FP8, weights only": Recipe.with_defaults("fp8", weight_only=True),
        "INT8, weights only": Recipe.with_defaults("int8", weight_only=True),
        "FP8": Recipe.with_defaults("fp8"),
        "W8A8": Recipe.with_defaults("int8"),
        "W8A8, SmoothQuant": Recipe.with_defaults("smoothquant"),
        "INT4, GPTQ": integers("gptq"),
        "INT4, AWQ": integers("awq", symmetric=False),
        "INT4, nearest": integers("rtn"),
        "at load: int8": "int8",
        "at load: int4": "int4",
        "at load: head in int8": "head=int8",
        "at load: head in fp8": "head=fp8",
        "at load: int4, head in int8": "int4,head=int8",
        "W8A8, one fixed scale of inputs": Recipe("int8", Grid(8), "tensor"),
        "INT3, GPTQ": integers("gptq", 3),
        "INT3, nearest": integers("rtn", 3),
        "INT2, GPTQ": integers("gptq", 2),
        "INT2, nearest": integers("rtn", 2),
    }


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
    for case, recipe in cases(args.group_size).items():
        if case in done:
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            model, load = str(folder), None
            if isinstance(recipe, str):
                load = recipe
            else:
                model = str(Path(temporary) / "model")
                options = Options(
                    samples=args.samples, length=args.length, force=True, device=args.device
                )
                quantize(folder, name, Path(model), recipe, options)
            found = measure_perplexity(
                EngineArgs(model=model, device=args.device, quantization=load),
                args.text, base=str(folder), window=args.window, limit=args.limit,
            )  # fmt: skip
        metrics = {**figures(found), "seconds": time.perf_counter() - began}
        settings = {
            "text": args.text.name, "group_size": args.group_size, "samples": args.samples,
            "length": args.length, "window": args.window,
        }  # fmt: skip
        record = make_record(case, metrics, model=name, device=args.device, settings=settings)
        append_jsonl(args.out, [record])
        print(format_table([record]).splitlines()[-1], flush=True)
    records = [record for record in read_jsonl(args.out) if record.model == name]
    print(format_table(records))
    if args.plot is not None:
        plots.quality(records, args.plot)


def figures(found: Perplexity) -> dict[str, float]:
    base = found.base or found
    return {
        "perplexity": found.perplexity,
        "base_perplexity": base.perplexity,
        "change_percent": 100 * (found.perplexity / base.perplexity - 1),
        "kl": found.kl or 0.0,
        "tokens": float(found.tokens),
    }


if __name__ == "__main__":
    main()
