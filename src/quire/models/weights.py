"""The strict streaming loader: every tensor of the checkpoint has a place, every place a tensor.

Names and shapes are checked from the files' headers before a byte is copied. Then tensors are read
by a few threads, only the part that this rank holds, straight into their (stacked) parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.pieces import Piece, named_pieces
from quire.models.decoder import Decoder
from quire.models.dummy import fill_dummy
from quire.models.families.family import Family, Source
from quire.models.files import open_file, some, weight_files
from quire.models.kv_scales import is_scale
from quire.models.registry import BY_NAME
from quire.parallel import ProcessGroup

Progress = Callable[[int, int], None]

_READERS = 8
"""Threads that read tensors."""
_PIECE = 32 << 20
"""Bytes copied at once."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def load_weights(
    model: Decoder,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fills `model` from the safetensors files of the folder `path`, or with random weights if
    `load_format` is "dummy". `progress` is told bytes done and bytes in all.

    Raises ModelError if a tensor is missing, unexpected, misshapen or of a wrong dtype, naming it.
    """
    if load_format == "dummy":
        fill_dummy(model, model.group, seed)
        return
    family = BY_NAME[model.spec.family]
    places = _places(model, family)
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(Path(path))]
        found = _check(files, places, family, tied=model.spec.tied_head)
        total = sum(entry.nbytes for entry in found.values())
        with ThreadPoolExecutor(_READERS) as pool:
            copies = [
                (entry, pool.submit(_fill, entry, places.get(name, ()), model.group))
                for name, entry in found.items()
            ]
            done = 0
            for entry, copied in copies:
                copied.result()
                done += entry.nbytes
                if progress is not None:
                    progress(done, total)
        if family.head in found and family.head not in places:
            _check_tied(found[family.head], model, family.head)


@dataclass(frozen=True, slots=True)
class _Place:
    piece: Piece
    source: Source


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the checkpoint: its open file, the name in it, its size."""

    file: Any
    name: str
    nbytes: int


def _places(model: Decoder, family: Family) -> dict[str, list[_Place]]:
    places: dict[str, list[_Place]] = {}
    for name, piece in named_pieces(model):
        source = family.source(model.spec, name)
        places.setdefault(source.name, []).append(_Place(piece, source))
    return places


def _check(
    files: list[Any], places: dict[str, list[_Place]], family: Family, *, tied: bool
) -> dict[str, _Entry]:
    """Every tensor that is to be read, by its canonical name; raises for what does not fit."""
    found: dict[str, _Entry] = {}
    problems: list[str] = []
    for file in files:
        for stored_name in sorted(file.keys()):
            name = stored_name.removeprefix(family.prefix)
            wanted = places.get(name)
            if wanted is None and not (tied and name == family.head):
                ignored = family.ignored is not None and family.ignored.search(name)
                if not ignored and not is_scale(name):
                    problems.append(f"unexpected tensor {stored_name}")
                continue
            if name in found:
                problems.append(f"{stored_name} is there twice")
                continue
            view = file.get_slice(stored_name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            expected = shape if wanted is None else _stored_shape(wanted)
            if shape != expected:
                problems.append(f"{stored_name} has shape {shape}, expected {expected}")
            elif dtype not in _FLOATS:
                problems.append(f"{stored_name} has dtype {dtype}, expected a float of 16 bits up")
            nbytes = _WIDTHS.get(dtype, 1) * torch.Size(shape).numel()
            found[name] = _Entry(file, stored_name, nbytes)
    missing = [name for name in places if name not in found]
    problems = [f"missing tensor {name}" for name in missing] + problems
    if problems:
        raise ModelError(f"the checkpoint does not fit its config.json: {some(problems)}")
    return found


def _stored_shape(places: list[_Place]) -> tuple[int, ...]:
    """The shape that the checkpoint's tensor must have to serve all of `places`."""
    shape = list(places[0].piece.shape)
    if places[0].source.span is not None:
        shape[0] = max(place.source.span[1] for place in places if place.source.span)
    return tuple(reversed(shape)) if places[0].source.transposed else tuple(shape)


@torch.inference_mode()
def _fill(entry: _Entry, places: Sequence[_Place], group: ProcessGroup) -> None:
    for place in places:
        _copy(_share(entry.file.get_slice(entry.name), place, group), place.piece.target)


def _copy(part: Tensor, target: Tensor) -> None:
    """To a GPU through pinned memory, a piece at a time: several threads doing so keep the link
    busy, while a copy from the file's pages would be staged by the driver, one thread at a time."""
    if target.device.type != "cuda" or not part.numel():
        target.copy_(part)
        return
    rows = max(1, _PIECE // max(1, part[0].nbytes)) if part.ndim else 1
    for start in range(0, len(part), rows):
        piece = part[start : start + rows]
        staged = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)
        target[start : start + rows].copy_(staged, non_blocking=True)


def _share(view: Any, place: _Place, group: ProcessGroup) -> Tensor:
    """This rank's part of a stored tensor, in the orientation of the parameter."""
    piece, source = place.piece, place.source
    ranges = [(0, size) for size in piece.shape]
    if piece.shard.dim is not None:
        dim = piece.shard.dim
        ranges[dim] = piece.shard.bounds(piece.shape[dim], group.rank, group.world)
    if source.span is not None:
        low, high = ranges[0]
        ranges[0] = source.span[0] + low, source.span[0] + high
    if source.transposed:
        ranges.reverse()
    part: Tensor = view[tuple(slice(low, high) for low, high in ranges)]
    return part.t() if source.transposed else part


def _check_tied(entry: _Entry, model: Decoder, name: str) -> None:
    """A tied model may bring its head along, if it is the embedding again."""
    piece = next(iter(model.embedding.pieces()))
    place = _Place(piece, Source(name))
    view = entry.file.get_slice(entry.name)
    shape = tuple(view.get_shape())
    if shape == piece.shape:
        head = _share(view, place, model.group).to(piece.target.device, piece.target.dtype)
        if torch.equal(head, piece.target):
            return
    raise ModelError(
        f"config.json says that the head is tied to the embeddings, but {name} {shape} differs "
        f"from the embeddings {piece.shape}"
    )
