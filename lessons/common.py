"""Shared by the lessons: the model, tables, and claims that a script proves.

Lessons are modules, run from the repository's root: python -m lessons 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lessons import mine
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.errors import QuireError
from quire.models import (
    Decoder,
    ModelSpec,
    build_model,
    load_config,
    load_weights,
    resolve_model_path,
    spec_from_config,
)
from quire.models.files import open_file, weight_files
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model on the CPU in float32. Each part is read when it is first used."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return load_config(self.path)

    @cached_property
    def spec(self) -> ModelSpec:
        """The same shapes, as Quire describes a model."""
        return spec_from_config(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_path(self.path)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by the names that they have in its files."""
        with contextlib.ExitStack() as stack:
            files = [open_file(stack, file) for file in weight_files(self.path)]
            return {name: file.get_tensor(name).float() for file in files for name in file.keys()}  # noqa: SIM118

    @cached_property
    def decoder(self) -> Decoder:
        """The model that the engine runs, with its weights."""
        decoder = build_model(self.spec, device="cpu", dtype=torch.float32)
        load_weights(decoder, self.path)
        return decoder


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser that knows `--model`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model",
        help="a folder or a hub id, such as Qwen/Qwen3-0.6B (default: the embedded quire-tiny)",
    )
    return made


def load(args: argparse.Namespace) -> Loaded:
    """Finds the model of `--model`. Exits with status 2 if there is none."""
    if args.model is None:  # so small that more threads would mostly wait for each other
        torch.set_num_threads(1)
    try:
        found = Loaded(resolve_model_path(args.model))
        found.config  # noqa: B018 - reads the file
        return found
    except QuireError as error:
        print(f"--model: {error}", file=sys.stderr)
        sys.exit(2)


def own_model(model: Loaded) -> mine.Model:
    """Returns the reader's model over a checkpoint. Exits with status 2 if it is no Qwen3."""
    if model.config["model_type"] != "qwen3":
        print(
            f"the lessons build Qwen3; {model.path} is {model.config['model_type']}",
            file=sys.stderr,
        )
        sys.exit(2)
    return mine.Model(model.path)


def engine(model: Loaded, **settings: Any) -> EngineCore:
    """Returns the engine's loop over this model on a CPU. settings: of `EngineArgs`."""
    return build_core(resolve(EngineArgs(model=str(model.path), device="cpu", **settings)))


def half(model: Loaded, folder: Path) -> Path:
    """Writes the first half of a model's layers, and what is around them, into a folder, and
    returns the folder."""
    count, kinds = model.config["num_hidden_layers"] // 2, model.config.get("layer_types")
    shorter = {"num_hidden_layers": count} | ({"layer_types": kinds[:count]} if kinds else {})
    (folder / "config.json").write_text(json.dumps(model.config | shorter))
    kept = {
        name: weight.bfloat16()
        for name, weight in model.weights.items()
        for layer in (re.search(r"\.layers\.(\d+)\.", name),)
        if layer is None or int(layer[1]) < count
    }
    save_file(kept, folder / "model.safetensors")
    for file in model.path.glob("*token*"):
        (folder / file.name).symlink_to(file.resolve())
    return folder


def skewed_lengths(count: int) -> list[tuple[int, int]]:
    """Returns (prompt, prompt and output) in tokens of some requests: most are short, a few long,
    at most 1200 and 800."""
    draw = np.random.default_rng(0)
    prompts = np.minimum(draw.lognormal(5, 1, count), 1200).astype(int)
    outputs = 1 + np.minimum(draw.lognormal(4.5, 1, count), 799).astype(int)
    return list(zip(prompts.tolist(), (prompts + outputs).tolist(), strict=True))


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown, numbers to the right."""
    cells = [list(headers), *([_text(value) for value in row] for row in rows)]
    numeric = [
        all(_is_number(line[column]) for line in cells[1:]) for column in range(len(headers))
    ]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(headers))]
    aligned = [
        [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        for line in cells
    ]
    rule = [
        "-" * (width - 1) + (":" if right else "-")
        for width, right in zip(widths, numeric, strict=True)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [aligned[0], rule, *aligned[1:]])


def check(condition: bool, claim: str) -> None:
    """Prints the claim, with its figures, and whether it holds. Exits with status 1 if not."""
    print(f"{'holds' if condition else 'FAILS'}: {claim}")
    if not condition:
        sys.exit(1)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:2] in {f"-{digit}" for digit in range(10)}
