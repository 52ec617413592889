"""Measures the table of targets on a machine with a GPU, and prints it as Markdown.

    make bench-gpu                                    # all parts, on the shapes in bench/configs
    python bench/gpu_table.py FOLDER ... --list       # the parts, for those folders' models
    python bench/gpu_table.py --part qwen3-8b:cases   # one part; it ends within ten minutes

Weights are random, so a folder needs only its config.json. --scratch FOLDER writes checkpoints to
time starts from files too. A model named as in targets.py gets the cases of its targets. Other
models get `nano`, `b64`, `b1` and `ttft`. Records are appended to RESULTS/CARD_throughput.jsonl,
_startup.jsonl, _ablation.jsonl and _breakdown.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import report
from random_checkpoint import write
from targets import TARGETS

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b", "llama-2-7b")
OTHERS = ("nano", "b64", "b1", "ttft")
PROFILE = "breakdown"
LIMIT = 590
"""Seconds that a part may take."""
_DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init")


@dataclass(frozen=True)
class Part:
    """One run of `quire bench` or `quire profile`.

    Attributes:
        file: the part of the records' file name after the card.
        config: folder of a configuration. If the run's checkpoint does not exist, one with random
            weights is made of it.
    """

    name: str
    arguments: tuple[str, ...]
    file: str
    config: Path | None = None


def parts_of(folder: Path, scratch: Path | None = None) -> list[Part]:
    """Returns the parts to run for a model.

    They are its cases, its start (warm and cold), its ablation, its deterministic cases and its
    profile. With `scratch`, its start from files is added.
    """
    model = folder.name
    path = (str(folder), *_DUMMY)
    known = [t.case for t in TARGETS if t.model.lower() == model.lower() and t.case != "startup"]
    cases = tuple(dict.fromkeys(known or OTHERS))
    steady = tuple(case for case in cases if case.startswith(("b1", "b64", "ttft")))
    parts = [
        Part(f"{model}:cases", ("throughput", *path, *_each("--case", cases)), "throughput"),
        Part(f"{model}:start", ("startup", *path), "startup"),
        Part(f"{model}:cold", ("startup", *path, "--cold", "--repeat", "1"), "startup"),
        Part(f"{model}:switches", ("ablation", *path, *_each("--case", steady)), "ablation"),
    ]
    decided = (*path, "--deterministic", *_each("--case", steady))
    parts.append(Part(f"{model}:deterministic", ("throughput", *decided), "throughput"))
    steps = ("--rows", "1", "--rows", "64", "--prompt-tokens", "512", "--steps", "200")
    profile = (*path, "--no-enable-prefix-caching", *steps)
    parts.append(Part(f"{model}:profile", profile, PROFILE))
    if scratch is not None:
        files = (str(scratch / model), "--skip-tokenizer-init")
        parts.append(Part(f"{model}:files", ("startup", *files), "startup", folder))
        cold = ("startup", *files, "--cold", "--repeat", "1")
        parts.append(Part(f"{model}:files-cold", cold, "startup", folder))
    return parts


def _each(flag: str, values: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (flag, value))


def run(part: Part, results: Path, card: str) -> bool:
    """Returns whether the part succeeded. Records are stored as they come, so few are lost."""
    file = results / f"{slug(card)}_{part.file}.jsonl"
    print(f"== {part.name}", flush=True)
    if part.config is not None:
        checkpoint = Path(part.arguments[1])
        if not (checkpoint / "config.json").exists():
            write(part.config, checkpoint)
    try:
        words = ("profile",) if part.file == PROFILE else ("bench",)
        command = ["-m", "quire", *words, *part.arguments, "--output", str(file)]
        return subprocess.run([sys.executable, *command], timeout=LIMIT).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{part.name} took more than {LIMIT} seconds", file=sys.stderr)
        return False


def card_name() -> str:
    """Returns the GPU's name, by another process, because the query takes GPU memory."""
    code = "from quire.tools.bench.record import card_name; print(card_name('cuda'))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["it cannot be asked for"]
        raise SystemExit(f"no GPU: {last[0]}")
    return asked.stdout.strip()


def slug(card: str) -> str:
    """NVIDIA H200 -> h200."""
    return card.lower().removeprefix("nvidia ").replace(" ", "_")


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    unknown = set(names) - {part.name for part in parts}
    if unknown:
        known = ", ".join(part.name for part in parts)
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {known}")
    return [part for part in parts if not names or part.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = [HERE / "configs" / model for model in MODELS]
    parser.add_argument("models", type=Path, nargs="*", default=default, help="model folders")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--part", action="append", default=[], help="only this part (repeatable)")
    parser.add_argument("--scratch", type=Path, help="a folder for checkpoints of random weights")
    parser.add_argument("--list", action="store_true", help="print the parts' names and stop")
    options = parser.parse_args()
    absent = [str(folder) for folder in options.models if not (folder / "config.json").is_file()]
    if absent:
        raise SystemExit(f"no config.json in: {', '.join(absent)}")
    parts = [
        part for folder in options.models for part in parts_of(folder.resolve(), options.scratch)
    ]
    if options.list:
        print("\n".join(part.name for part in parts))
        return 0
    parts, card = chosen(parts, options.part), card_name()
    options.results.mkdir(parents=True, exist_ok=True)
    failed = [part.name for part in parts if not run(part, options.results, card)]
    book = report.make_book(report.load(options.results), report.load_peers(), card)
    print("\n" + report.cases(book) + "\n" + report.utilization(book))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
