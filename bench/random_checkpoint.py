"""A checkpoint of random weights for a folder that holds only a config.json.

    python bench/random_checkpoint.py bench/configs/qwen3-8b /scratch/qwen3-8b

To time a start with real files: the loader finds the same names, shapes, shards and bytes as in the
model's own checkpoint. The values are noise that repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.layers.parameter_slice import named_slices
from quire.models import build_model, load_config, spec_from_config
from quire.models.config import family_named

SHARD = 5_000_000_000
"""Bytes of a file, at most, as people publish them."""


def shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], set[str], torch.dtype]:
    """(name to shape of every tensor, those that are ones, their dtype)."""
    spec = spec_from_config(load_config(folder))
    family = family_named(spec.family)
    if family is None:
        raise SystemExit(f"there is no family {spec.family!r}")
    model = build_model(spec, device="meta", dtype=spec.dtype)
    found: dict[str, tuple[int, ...]] = {}
    ones = set()
    for name, part in named_slices(model):
        source = family.source(spec, name)
        shape = list(part.shape)
        if source.span is not None:
            shape[0] = source.span[1]
        if source.transposed:
            shape.reverse()
        # Of slices that share a tensor, the one that ends last knows its size.
        found[source.name] = max(found.get(source.name, ()), tuple(shape))
        if part.initial == "ones":
            ones.add(source.name)
    return found, ones, spec.dtype


def shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """The names in files of at most `most` bytes, or of one tensor."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


def fill(shape: tuple[int, ...], noise: Tensor) -> Tensor:
    count = math.prod(shape)
    return noise.repeat(-(-count // len(noise)))[:count].reshape(shape)


def write(source: Path, target: Path, shard_bytes: int = SHARD) -> int:
    """Writes the checkpoint; its tensors' bytes."""
    found, ones, dtype = shapes(source)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 20, generator=generator).mul_(0.02).to(dtype)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in found.items()}
    files = list(shards(sizes, shard_bytes))
    target.mkdir(parents=True, exist_ok=True)
    index = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {
            name: torch.ones(found[name], dtype=dtype) if name in ones else fill(found[name], noise)
            for name in names
        }
        save_file(tensors, target / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    about = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(json.dumps(about, indent=2))
    shutil.copy(source / "config.json", target / "config.json")
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="a folder with a config.json")
    parser.add_argument("target", type=Path, help="a new or empty folder")
    options = parser.parse_args()
    if not (options.source / "config.json").is_file():
        raise SystemExit(f"no config.json in {options.source}")
    if options.target.exists() and any(options.target.iterdir()):
        raise SystemExit(f"{options.target} is not empty")
    print(f"{write(options.source, options.target) / 1e9:.2f} GB in {options.target}")


if __name__ == "__main__":
    main()
