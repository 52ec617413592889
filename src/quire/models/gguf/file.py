"""Reads the tensors of a GGUF file under the names of this project's parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder import DecoderLayers
from quire.models.families.family import Family, Source
from quire.models.gguf.arrays import QuickArrays
from quire.models.gguf.layouts import IGNORED, NAMES, OUTER, Config, Layout, Rows
from quire.models.gguf.report import describe
from quire.quantization.gguf import BLOCKS, any_expert_name, dequantize_rows, library
from quire.system import open_regular

logger = logging.getLogger(__name__)
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")
"""Name of an expert's tensor in early files of Mixtral."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PLAIN = {
    "F32": ("F32", torch.float32),
    "F16": ("F16", torch.float16),
    "BF16": ("BF16", torch.bfloat16),
}
_NO_MATRIX = re.compile(r"(^|\.)(embedding|positions|\w*norm|router|sinks|shared\.gate|conv\.\w)$")
"""Parameters that are not weights of linear layers. If the file quantizes them, they are
dequantized."""
_ROWS = 4096
"""Number of rows to dequantize at once."""
_MOST_READS = 3 << 20
"""Most values in a header. A vocabulary of 200,000 tokens with its merges has 1.5 million."""


class GgufFile:
    """A model's GGUF file. If the model is split into several files, opening one opens all of them.

    After `lay_out` it has the interface of a safetensors file: `keys`, `get_slice`, `get_tensor`.
    Tensors are read on demand. Quantized weights of linear layers are returned as bytes. Other
    quantized tensors are dequantized.

    Attributes:
        fields: the settings. If there are several files, the first has them.
        tensors: the tensors of all files, by the files' names.

    Raises:
        ModelError: the file is invalid, or another of the model's files is missing.
        ConfigError: the `gguf` library is not installed.
    """

    def __init__(self, path: Path) -> None:
        gguf = library()
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        for part in parts_of(path):
            try:
                with open_regular(part) as file:
                    reader = _bounded_reader(gguf, file)
                fields = {name: field.contents() for name, field in reader.fields.items()}
            except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise ModelError(f"cannot read {part.name}: {error}") from error
            except RecursionError:
                raise ModelError(
                    f"cannot read {part.name}: its arrays are nested too deeply"
                ) from None
            self.fields = {**fields, **self.fields}
            self.tensors |= {tensor.name: tensor for tensor in reader.tensors}
        count = self.fields.get("split.tensors.count")
        if count is not None and count != len(self.tensors):
            raise ModelError(
                f"{path.name}: the files of the model have {len(self.tensors)} tensors, expected "
                f"{count}"
            )
        self._views: dict[str, GgufTensor | ComputedTensor] = {}

    def family_for(self, model: DecoderLayers, family: Family) -> Family:
        """Returns the family with this file's names, and logs the weight formats on the device."""
        types = [tensor.tensor_type.name for tensor in self.tensors.values()]
        logger.info("%s", describe(types, model))
        return stored_family(family)

    def floats(self, name: str) -> list[float]:
        """Returns a small tensor, by its name in the file. Raises ModelError unless it is F32."""
        tensor = self.tensors[name]
        if tensor.tensor_type.name != "F32":
            raise ModelError(f"{name} has the type {tensor.tensor_type.name}, expected F32")
        return [float(value) for value in np.array(tensor.data).reshape(-1)]

    def lay_out(self, layout: Layout, config: Config, layers: int) -> GgufFile:
        """Gives the tensors the names of the model's parameters, and returns the file.

        Args:
            layout: layout of the architecture.
            config: the model's config.json.
            layers: number of layers; tensors of further layers are ignored.

        Raises:
            ModelError: a tensor does not fit the configuration.
        """
        self._views = {}
        names = {**NAMES, **layout.names}
        for stored, tensor in self.tensors.items():
            found = _BLOCK.fullmatch(stored)
            if stored.split(".")[0] in IGNORED or (
                found and (int(found[1]) >= layers or found[2].split(".")[0] in IGNORED)
            ):
                continue
            for name, order, expert in _places(stored, tensor, names, config):
                self._add(name, tensor, order, expert, layout)
        for index in range(layers):
            for own, computed in layout.computed.items():
                sources = [self.tensors.get(f"blk.{index}.{name}") for name in computed.sources]
                if None in sources:
                    continue
                for name in computed.sources:
                    self._views.pop(f"blk.{index}.{name}", None)
                view = ComputedTensor(computed.compute, config, sources)
                self._views[f"layers.{index}.{own}"] = view
        return self

    def _add(
        self, name: str, tensor: Any, order: Rows | None, expert: int | None, layout: Layout
    ) -> None:
        if name in self._views:
            raise ModelError(f"the tensor {tensor.name} occurs twice")
        module, _, kind = name.rpartition(".")
        own = name.split(".", 2)[2] if name.startswith("layers.") else name
        offset = 0.0
        if kind == "weight" and module.endswith("norm"):
            offset = 0.0 if own.removesuffix(".weight") in layout.raw_norms else layout.norm_offset
        shape = layout.shapes.get(own)
        blocks = kind == "weight" and not _NO_MATRIX.search(module)
        self._views[name] = GgufTensor(name, tensor, order, expert, offset, shape, blocks)

    @property
    def types(self) -> dict[str, str]:
        """Returns the ggml types of quantized weights, by `any_expert_name` of the module."""
        return {
            any_expert_name(name.removesuffix(".weight")): view.type
            for name, view in self._views.items()
            if isinstance(view, GgufTensor) and view.blocks
        }

    def keys(self) -> list[str]:
        return list(self._views)

    def get_slice(self, name: str) -> GgufTensor | ComputedTensor:
        return self._views[name]

    def get_tensor(self, name: str) -> Tensor:
        found = self.get_slice(name)
        return found[tuple(slice(0, size) for size in found.get_shape())]


def stored_family(family: Family) -> Family:
    """Returns a copy of a family for GGUF files, whose tensors have the parameters' names."""
    return Family(
        family.name, family.spec, lambda spec, name: Source(name), head="head.weight",
        implements=family.implements,
    )  # fmt: skip


def parts_of(path: Path) -> list[Path]:
    """Returns all files of a model, in order, given the path of one.

    Raises:
        ModelError: a file is missing.
    """
    path = path.resolve()
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    parts = [
        path.with_name(f"{found[1]}-{index:05}-of-{found[3]}.gguf")
        for index in range(1, int(found[3]) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path.name} is one of {int(found[3])} files of its model; missing: "
            + ", ".join(missing[:4])
        )
    return parts


def _places(
    stored: str, tensor: Any, names: Any, config: Config
) -> Iterator[tuple[str, Rows | None, int | None]]:
    """Yields the parameters that a tensor holds: name, rows, and the expert's index.

    Rows are None if the parameter is the whole tensor, the expert is None if the tensor belongs to
    no single expert. An unknown tensor keeps its name.
    """
    found = _BLOCK.fullmatch(stored)
    if found is None:
        stem, _, kind = stored.rpartition(".")
        yield f"{OUTER.get(stem, stem)}.{kind}", None, None
        return
    layer, name = f"layers.{found[1]}", found[2]
    if single := _EXPERT.fullmatch(name):
        own = names[f"ffn_{single[1]}_exps"].format(single[2])
        yield f"{layer}.{own}.weight", None, None
        return
    stem, _, kind = name.rpartition(".")
    whole = names.get(name)
    places, behind = (whole, "") if whole is not None else (names.get(stem), f".{kind}")
    if places is None:
        yield stored, None, None
        return
    if isinstance(places, str):
        places = ((places, None),)
    else:
        places = [(part.name, part.order) for part in places]
    for own, order in places:
        experts = range(tensor.data.shape[0]) if "{}" in own else (None,)
        rows = tensor.data.shape[1 if "{}" in own else 0]
        try:
            chosen = None if order is None else order(config, rows)
        except ModelError as error:
            raise ModelError(f"{stored}: {error}") from error
        for expert in experts:
            yield f"{layer}.{own.format(expert)}{behind}", chosen, expert


def _bounded_reader(gguf: Any, file: BinaryIO) -> Any:
    """Returns the library's reader of a file, with checks.

    The library trusts every count in a file. This reader raises ValueError for a field after the
    end of the file, and for a header with too many values.
    """

    class Reader(QuickArrays, gguf.GGUFReader):  # type: ignore[misc]
        reads = 0

        def count(self, values: int) -> None:
            self.reads += values
            if self.reads > _MOST_READS:
                raise ValueError(f"its header has more than {_MOST_READS} values")

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            self.count(1)
            found = super()._get(offset, dtype, count, *rest, **more)
            if len(found) < count:
                raise ValueError("the file ends in the middle of a field")
            return found

    # Mode "c" maps the file copy-on-write, because PyTorch requires writable memory.
    return Reader(file, "c")


class GgufTensor:
    """A parameter that is a tensor of the file, or some of its rows.

    Args:
        name: the parameter's name, for errors.
        tensor: a tensor of the file.
        order: indices of the tensor's rows that form the parameter, or None for all rows.
        expert: the expert's index along the first axis of a tensor with all experts, or None.
        offset: added to the stored values.
        shape: sizes that replace the first axis, or None.
        blocks: whether quantized blocks are read as bytes instead of floats.
    """

    def __init__(
        self, name: str, tensor: Any, order: Rows | None, expert: int | None, offset: float,
        shape: tuple[int, ...] | None, blocks: bool,
    ) -> None:  # fmt: skip
        self.type: str = tensor.tensor_type.name
        if self.type not in BLOCKS and self.type not in _PLAIN:
            known = ", ".join((*BLOCKS, *_PLAIN))
            raise ModelError(
                f"{name} has the type {self.type}, which is not supported; known: {known}"
            )
        self.blocks = blocks and self.type in BLOCKS
        self._data = tensor.data if expert is None else tensor.data[expert]
        # GGUF lists sizes from the innermost axis to the outermost.
        sizes = [int(size) for size in reversed(tensor.shape)][0 if expert is None else 1 :]
        if shape is not None and len(shape) + len(sizes) - 1 <= 3 and shape[-1] == 1:
            if shape == (1,):
                # The file stores a single row as a vector.
                self._data = self._data.reshape(1, -1)
                sizes = [1, *sizes[-1:]]
            elif len(sizes) == 2:
                sizes.insert(1, 1)
        self._order = order
        if order is not None:
            sizes[0] = len(order)
        self._shape = tuple(sizes)
        self._offset = offset

    def get_shape(self) -> list[int]:
        if self.blocks:
            return [self._shape[0], self._data.shape[-1]]
        return list(self._shape)

    def get_dtype(self) -> str:
        if self.blocks:
            return "U8"
        return _PLAIN[self.type][0] if self.type in _PLAIN and not self._offset else "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        rows = part[0]
        data = self._data[rows if self._order is None else self._order[rows]]
        rest = (slice(None), *part[1:])
        if self.blocks:
            return torch.from_numpy(np.asarray(data))[rest]
        if self.type in _PLAIN:
            whole = torch.from_numpy(np.asarray(data)).view(_PLAIN[self.type][1])
            whole = whole.float() + self._offset if self._offset else whole
            return whole.view(-1, *self._shape[1:])[rest]
        out = torch.empty(len(data), *self._shape[1:])
        for start in range(0, len(data), _ROWS):
            some = torch.from_numpy(np.asarray(data[start : start + _ROWS]))
            found = dequantize_rows(some, self.type) + self._offset
            out[start : start + _ROWS] = found.view(-1, *self._shape[1:])
        return out[rest]


class ComputedTensor:
    """A parameter that is computed, in float32, from tensors of the file."""

    def __init__(self, compute: Any, config: Config, sources: list[Any]) -> None:
        self._compute, self._config, self._sources = compute, config, sources
        self._shape: list[int] | None = None

    def _tensor(self) -> Tensor:
        wide = [
            torch.from_numpy(library().dequantize(source.data, source.tensor_type).copy())
            for source in self._sources
        ]
        found: Tensor = self._compute(self._config, *wide)
        return found

    def get_shape(self) -> list[int]:
        if self._shape is None:
            self._shape = list(self._tensor().shape)
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        return self._tensor()[part]
