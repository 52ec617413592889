"""Loads a checkpoint's weights. It is strict: no tensor may be missing, unexpected or misshapen.

Names, shapes and dtypes are checked in the files' headers before any weight is read. Then threads
copy this rank's part of each tensor straight into the parameters.
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
from quire.layers.parameter_slice import LoadableModel, ParameterSlice, named_slices
from quire.models.config import family_named
from quire.models.decoder import Decoder, DecoderLayers
from quire.models.dummy import fill_dummy
from quire.models.families.family import Family, Source
from quire.models.files import DTYPES, first_few, open_file, weight_files
from quire.models.kv_scales import is_scale
from quire.models.sanity import check_weights
from quire.quantization import FLOATS

Progress = Callable[[int, int], None]

READERS = 8
"""Number of threads that read tensors."""
_CHUNK = 32 << 20
"""Bytes of a tensor that a thread copies and converts at once."""


def load_weights(
    model: LoadableModel,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    family: Family | None = None,
) -> None:
    """Fills a model's weights.

    Args:
        model: a model with uninitialized weights.
        path: folder of the checkpoint.
        load_format: "dummy" fills in random weights instead.
        seed: seed of random weights.
        progress: called with the bytes read so far and the bytes in total.
        family: names the checkpoint's tensors, by default the model's family.

    Raises:
        ModelError: a tensor is missing, unexpected, misshapen or of a wrong dtype, or quantized
            weights are damaged (`check_weights`). The error names the tensor.
    """
    if load_format == "dummy":
        fill_dummy(model, seed)
        model.finish()
        return
    family = family or family_named(model.spec.family)
    if family is None:
        raise ModelError(f"there is no family {model.spec.family!r}")
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(Path(path))]
        # A GGUF file names tensors after the model's parameters, for models of every family.
        family = getattr(files[0], "family_for", lambda model, own: own)(model, family)
        places = places_of(model, family)
        found = check_tensors(files, places, family, tied=is_tied(model))
        total = sum(entry.nbytes for entry in found.values())
        with ThreadPoolExecutor(READERS) as pool:
            copies = [
                (entry, pool.submit(fill, entry, places.get(name, ())))
                for name, entry in found.items()
            ]
            done = 0
            for entry, copied in copies:
                copied.result()
                done += entry.nbytes
                if progress is not None:
                    progress(done, total)
        if isinstance(model, Decoder) and family.head in found and family.head not in places:
            check_tied(found[family.head], model, family.head)
    model.finish()
    if any("scales" in name for name, _ in model.named_parameters()):
        check_weights(model, family)


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """A parameter slice, and the place of its content in the checkpoint."""

    slice: ParameterSlice
    source: Source


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        file: the open file with the tensor.
        name: name of the tensor in the file.
        nbytes: size of the whole tensor.
    """

    file: Any
    name: str
    nbytes: int


def is_tied(model: LoadableModel) -> bool:
    """Returns whether the model's head shares the weights of its embeddings."""
    return isinstance(model, DecoderLayers) and model.spec.tied_head


def places_of(model: LoadableModel, family: Family) -> dict[str, list[SlicePlace]]:
    places: dict[str, list[SlicePlace]] = {}
    for name, part in named_slices(model):
        if name == "head.weight" and is_tied(model):
            name = "embedding.weight"
        source = family.source(model.spec, name)
        places.setdefault(source.name, []).append(SlicePlace(part, source))
    return places


def check_tensors(
    files: Sequence[Any],
    places: dict[str, list[SlicePlace]],
    family: Family,
    *,
    tied: bool,
    partial: bool = False,
) -> dict[str, StoredTensor]:
    """Returns the tensors to read, by canonical name.

    Args:
        files: open files.
        places: places of all tensors, by canonical name. The call chooses their layouts.
        family: names the tensors.
        tied: whether the head may repeat the embeddings.
        partial: whether the files may hold only some of the tensors.

    Raises:
        ModelError: tensors are missing, unexpected, misshapen or of a wrong dtype.
    """
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        for stored_name in sorted(file.keys()):
            name = family.canonical(stored_name)
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
            shape, dtype = tuple(view.get_shape()), DTYPES.get(view.get_dtype())
            if wanted is not None:
                wanted = places[name] = in_layout(wanted, shape)
            expected = shape if wanted is None else _stored_shape(wanted)
            known = FLOATS if wanted is None else wanted[0].slice.dtypes
            if shape != expected and shape != (*expected, 1):
                problems.append(f"{stored_name} has shape {shape}, expected {expected}")
            elif dtype not in known:
                names = ", ".join(sorted(key for key, value in DTYPES.items() if value in known))
                problems.append(
                    f"{stored_name} has dtype {view.get_dtype()}, expected one of: {names}"
                )
            nbytes = (1 if dtype is None else dtype.itemsize) * torch.Size(shape).numel()
            found[name] = StoredTensor(file, stored_name, nbytes)
    missing = [name for name in places if name not in found and not partial]
    problems = [f"missing tensor {name}" for name in missing] + problems
    if problems:
        what = "an update does not fit the model"
        if not partial:
            what = "the checkpoint does not fit its config.json"
        raise ModelError(f"{what}: {first_few(problems)}")
    return found


def in_layout(places: list[SlicePlace], shape: tuple[int, ...]) -> list[SlicePlace]:
    """Returns the places of a tensor of this shape: in the slices' own layout or in their other."""
    others = [
        SlicePlace(place.slice.other, place.source)
        for place in places
        if place.slice.other is not None
    ]
    fits = len(others) == len(places) and shape == _stored_shape(others)
    return others if fits and shape != _stored_shape(places) else places


def _stored_shape(places: list[SlicePlace]) -> tuple[int, ...]:
    """Returns the shape that the checkpoint's tensor must have to hold all of `places`."""
    shape = list(places[0].slice.shape)
    if places[0].source.span is not None:
        shape[0] = max(place.source.span[1] for place in places if place.source.span)
    if places[0].source.every is not None:
        _, size, period = places[0].source.every
        shape[0] = shape[0] // size * period
    return tuple(reversed(shape)) if places[0].source.transposed else tuple(shape)


@torch.inference_mode()
def fill(entry: StoredTensor, places: Sequence[SlicePlace]) -> None:
    for place in places:
        if place.slice.device.type == "meta":
            continue  # Another stage of the pipeline holds the parameter.
        try:
            _copy(_share(entry, place), place.slice)
        except ModelError as error:
            raise ModelError(f"{entry.name} {error}") from error


def _copy(part: Tensor, target: ParameterSlice) -> None:
    """Copies a part of a tensor to its parameter, `_CHUNK` bytes at a time.

    Copies to a GPU go through pinned memory, so that several threads together keep the link busy.
    Without it the driver would stage copies from the file's pages, one thread at a time. The caller
    keeps memory that is pinned already until the device has read it.
    """
    part = part if part.ndim else part.unsqueeze(0)
    rows = max(1, _CHUNK // max(1, part[:1].nbytes))
    for start in range(0, len(part), rows):
        chunk = part[start : start + rows].to(target.device if part.is_cuda else part.device)
        if target.device.type == "cuda" and chunk.device.type == "cpu":
            if chunk.is_contiguous() and chunk.is_pinned():
                target.write(chunk.to(target.device, non_blocking=True), start)
                continue
            staged = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True).copy_(chunk)
            chunk = staged.to(target.device, non_blocking=True)
        target.write(chunk, start)


def _share(entry: StoredTensor, place: SlicePlace) -> Tensor:
    """Returns this rank's part of a stored tensor, in the orientation of the parameter."""
    ranges, source = list(place.slice.ranges), place.source
    if not ranges:
        return entry.file.get_tensor(entry.name).reshape(())  # type: ignore[no-any-return]
    if source.span is not None:
        low, high = ranges[0]
        ranges[0] = source.span[0] + low, source.span[0] + high
    if source.every is not None:
        offset, size, period = source.every
        low, high = (end // size * period for end in ranges[0])
        rows = entry.file.get_slice(entry.name)[low:high].unflatten(0, (-1, period))
        every: Tensor = rows[:, offset : offset + size].flatten(0, 1)
        return every
    if source.transposed:
        ranges.reverse()
    view = entry.file.get_slice(entry.name)
    part: Tensor = view[tuple(slice(low, high) for low, high in ranges)].flatten(len(ranges) - 1)
    return part.t() if source.transposed else part


def check_tied(entry: StoredTensor, model: Decoder, name: str) -> None:
    """Raises ModelError unless a tied model's head in the checkpoint equals its embeddings."""
    own = next(iter(model.embedding.slices()))
    shape = tuple(entry.file.get_slice(entry.name).get_shape())
    if shape == own.shape:
        embedding = model.embedding.weight.data
        head = _share(entry, SlicePlace(own, Source(name))).to(embedding.device, embedding.dtype)
        # If the embeddings are on the meta device, another pipeline stage makes this check.
        if embedding.is_meta or torch.equal(head, embedding[: len(head)]):
            return
    raise ModelError(
        f"config.json says that the head is tied to the embeddings, but {name} {shape} differs "
        f"from the embeddings {own.shape}"
    )
