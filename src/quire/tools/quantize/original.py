"""The original checkpoint: reads its tensors, and builds parts of the model from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError, ModelError
from quire.layers.attention import AttentionSpec
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.mlp import MlpSpec
from quire.layers.parameter_slice import named_slices
from quire.layers.rotary import RotaryTable
from quire.models import load_config, model_quantization, spec_from_config
from quire.models.config import family_named
from quire.models.decoder import Block, Decoder, make_block
from quire.models.families.family import Source as Place
from quire.models.files import open_file, weight_files
from quire.parallel import SingleGroup
from quire.quantization import Quantization, Unquantized


class OriginalModel:
    """A folder with an unquantized checkpoint of a dense model.

    Attributes:
        stored: maps canonical names of tensors to their names in the checkpoint.

    Raises:
        ModelError: the folder holds no such model.
        ConfigError: the checkpoint is quantized already.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype | None) -> None:
        self.folder = folder
        self.device = device
        self.config = load_config(folder)
        self.spec = spec_from_config(self.config)
        self.dtype = dtype or self.spec.dtype
        if type(model_quantization(folder, self.config, self.spec)) is not Unquantized:
            raise ConfigError(f"{folder} is quantized already", "model")
        family = family_named(self.spec.family)
        if family is None:
            raise ModelError(f"there is no family {self.spec.family!r}")
        self.family = family
        for index, layer in enumerate(self.spec.layers):
            for part in (layer.mixer, layer.ffn):
                if not isinstance(part, AttentionSpec | MlpSpec):
                    raise ModelError(
                        f"layer {index} of {self.spec.architecture} has a {type(part).__name__}: "
                        "only dense models can be quantized"
                    )
        self._stack = contextlib.ExitStack()
        self.stored: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._read_as: dict[str, str] = {}
        for path in weight_files(folder):
            file = open_file(self._stack, path)
            for own in file.keys():  # noqa: SIM118 (no mapping)
                stored = self._published(own) if path.suffix == ".gguf" else own
                name = family.canonical(stored)
                self.stored[name], self._files[name] = stored, file
                self._read_as[name] = own
        self._rotary: dict[Any, RotaryTable] = {}

    def close(self) -> None:
        """Closes the files. Idempotent."""
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor by its canonical name. Raises ModelError if the checkpoint has none."""
        if name not in self._files:
            raise ModelError(f"the checkpoint does not fit its config.json: missing tensor {name}")
        found: Tensor = self._files[name].get_tensor(self._read_as[name])
        return found

    def _published(self, name: str) -> str:
        """Returns the name that published checkpoints use for a parameter of a GGUF file."""
        place = self.family.source(self.spec, name)
        if place != Place(place.name):
            raise ModelError(
                f"GGUF files of {self.spec.architecture} cannot be quantized again, because "
                f"published checkpoints store {place.name} in another form"
            )
        return place.name

    def _build(self, quantization: Quantization | None) -> Build:
        return Build(SingleGroup(), quantization or Unquantized(), self.device, self.dtype)

    def block(self, index: int, quantization: Quantization | None = None) -> Block:
        """Returns a block of the model with uninitialized weights."""
        layer = self.spec.layers[index]
        rope = getattr(layer.mixer, "rope", None)
        if rope is not None and rope not in self._rotary:
            self._rotary[rope] = RotaryTable(rope, self.spec.max_positions, device=self.device)
        rotary = None if rope is None else self._rotary[rope]
        build = self._build(quantization).within(f"layers.{index}")
        block: Block = make_block(layer, self.spec, rotary, build).eval()
        return block

    def shapes(self, index: int) -> Block:
        """Returns a block of the model that takes no memory."""
        build = replace(self._build(None), device=torch.device("meta"), name=f"layers.{index}")
        block: Block = make_block(self.spec.layers[index], self.spec, None, build)
        return block

    def outer(self) -> Decoder:
        """Returns the model without its blocks. Its weights are loaded."""
        model = Decoder(replace(self.spec, layers=self.spec.layers[:1]), self._build(None)).eval()
        model.layers = nn.ModuleList()
        self.fill(model)
        return model

    def stored_name(self, name: str) -> str:
        """Returns the name under which a tensor is stored, which the checkpoint may not have
        yet."""
        if name in self.stored:
            return self.stored[name]
        module, _, kind = name.rpartition(".")
        return f"{self.stored_module(module)}.{kind}"

    def stored_module(self, module: str) -> str:
        """Returns the checkpoint's name of a module."""
        return self.stored.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")

    def place(self, name: str) -> Place:
        """Returns the place of a parameter in the checkpoint."""
        return self.family.source(self.spec, name)

    @torch.inference_mode()
    def fill(
        self, module: nn.Module, prefix: str = "", tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Loads a part of the model.

        Args:
            module: the part.
            prefix: its name in the model.
            tensors: tensors by canonical name, instead of the checkpoint's.

        Raises:
            ModelError: a tensor is missing or misshapen.
        """
        for name, part in named_slices(module):
            place = self.place(f"{prefix}.{name}" if prefix else name)
            if tensors is not None and place.name not in tensors:
                raise ModelError(f"missing tensor {place.name}")
            tensor = self.tensor(place.name) if tensors is None else tensors[place.name]
            if place.transposed:
                tensor = tensor.t()
            if place.span is not None:
                tensor = tensor[slice(*place.span)]
            if tuple(tensor.shape) not in (part.shape, (*part.shape, 1)):
                raise ModelError(
                    f"{place.name} has shape {tuple(tensor.shape)}, expected {part.shape}"
                )
            tensor = tensor.to(self.device)
            part.write(tensor if tensor.ndim else tensor.unsqueeze(0), 0)
        for layer in module.modules():
            if isinstance(layer, Linear):
                layer.finish()

    def projections(self, block: Block, index: int) -> Iterator[tuple[str, str, Linear, slice]]:
        """Yields four values for each projection of a block.

        They are the module's name in the checkpoint, the name of its layer in the block, this
        layer, and the projection's rows in it.

        Raises:
            ModelError: the checkpoint stores a projection fused with others, or transposed.
        """
        for name, layer in block.named_modules():
            if not isinstance(layer, Linear):
                continue
            start = 0
            for output, size in zip(layer.outputs, layer.sizes, strict=True):
                full = f"layers.{index}.{name}" + (f".{output.name}" if output.name else "")
                place = self.place(f"{full}.weight")
                if place.transposed or place.span is not None:
                    raise ModelError(
                        f"{self.spec.architecture} stores {place.name} fused or transposed, but "
                        "quantized checkpoints cannot do that"
                    )
                yield place.name.removesuffix(".weight"), name, layer, slice(start, start + size)
                start += size
