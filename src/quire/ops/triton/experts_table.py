"""The choice of tiles for experts: what was measured on this card, or the rules of `experts_plan`.

What was measured is kept in the user's cache directory, for a card, a Triton and these sources, as
JSON: {"entries": {key: plan}}. `experts_tune` measures.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from quire.ops.triton.experts_plan import (
    AnyTile,
    ExpertsPlan,
    ExpertsShape,
    IntegerTile,
    MmaTile,
    RingTile,
    Tile,
    plan_for,
)
from quire.ops.triton.table_file import sources_hash, table_path, write_whole

RANGES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""The most tokens of each range that has plans of its own. Beyond the last, rules choose."""
Entries = dict[str, ExpertsPlan]
"""Plans by `key_of` their shapes."""

_KINDS: dict[str, type[AnyTile]] = {
    "loop": Tile, "mma": MmaTile, "integer": IntegerTile, "ring": RingTile
}  # fmt: skip
_measured: Entries = {}


def range_of(tokens: int) -> int | None:
    """Returns the most tokens of the range that holds so many; None: there is none."""
    return next((most for most in RANGES if tokens <= most), None)


def key_of(shape: ExpertsShape) -> str:
    """E.g. "bfloat16/t64/e128/k8/h2048/w768/uint4-g128"; t is its range's. What a shape says of the
    kernels that take it goes behind."""
    dtype = str(shape.dtype).removeprefix("torch.")
    parts = [dtype, f"t{range_of(shape.tokens)}", f"e{shape.experts}", f"k{shape.top_k}"]
    parts += [f"h{shape.hidden}", f"w{shape.width}", shape.format]
    parts += ["mma"] if shape.mma else []
    parts += ["ring"] if shape.ring else []
    parts += ["integer"] if shape.counts else []
    parts += ["expand"] if shape.expand else []
    return "/".join(parts)


@functools.lru_cache(maxsize=4096)
def chosen_plan(shape: ExpertsShape) -> ExpertsPlan:
    """Returns the plan of a shape: what was measured for its range, or the rules'."""
    found = _measured.get(key_of(shape)) if shape.format else None
    return found or plan_for(shape)


def use(entries: Mapping[str, ExpertsPlan]) -> None:
    """Lets this process choose what was measured, beside what it chooses already."""
    _measured.update(entries)
    chosen_plan.cache_clear()


def dumps(entries: Mapping[str, ExpertsPlan]) -> str:
    """Returns plans as JSON."""
    plans = {key: _as_json(plan) for key, plan in sorted(entries.items())}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(plan)}" for key, plan in plans.items())
    return f'{{"entries": {{\n{lines}\n}}}}\n'


def loads(text: str) -> Entries:
    """Returns plans from JSON. Raises ValueError, KeyError or TypeError on anything but what
    `dumps` writes."""
    return {key: _from_json(plan) for key, plan in dict(json.loads(text)["entries"]).items()}


def _as_json(plan: ExpertsPlan) -> dict[str, Any]:
    tiles: dict[str, Any] = {}
    for name, tile in (("up", plan.up), ("down", plan.down)):
        kind = next(kind for kind, known in _KINDS.items() if type(tile) is known)
        tiles[name] = {"kind": kind, **asdict(tile)}
    return {"kernel": plan.kernel, **tiles, "expand": plan.expand}


def _from_json(data: Any) -> ExpertsPlan:
    if data["kernel"] not in ("gemv", "grouped"):
        raise ValueError(f"unknown kernel {data['kernel']!r}")
    up, down = _tile(data["up"]), _tile(data["down"])
    return ExpertsPlan(data["kernel"], up, down, bool(data["expand"]))


def _tile(data: Any) -> AnyTile:
    values = dict(data)
    tile = _KINDS[values.pop("kind")](**values)
    if not all(isinstance(value, int) for value in astuple(tile)):
        raise TypeError(f"a tile has what is no number: {data}")
    return tile


def cache_path(card: str) -> Path:
    """Returns the path of this user's measurements on a card, with this Triton and sources."""
    return table_path("experts", card, sources_hash())


def read(card: str) -> Entries:
    """Returns what was measured on a card before; nothing where no file says so."""
    try:
        return loads(cache_path(card).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def store(card: str, entries: Mapping[str, ExpertsPlan]) -> Path:
    """Keeps measurements beside those of other models.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    path = cache_path(card)
    write_whole(path, dumps({**read(card), **entries}))
    return path
