"""Products behind the pooling, which `sentence-transformers` stores in folders of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import ModelError
from quire.features.pooling.sentence_files import DenseActivation, DenseModule
from quire.models.files import open_file, weight_files

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x, "tanh": torch.tanh, "gelu": F.gelu, "relu": torch.relu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """One product: activation(x weightᵀ + bias), in fp32.

    Attributes:
        weight: float32 [outputs, inputs].
        bias: float32 [outputs], or None.
        activation: applied to the result.
    """

    weight: Tensor
    bias: Tensor | None
    activation: DenseActivation

    def __call__(self, x: Tensor) -> Tensor:
        """Returns float32 [N, outputs] for x [N, inputs]."""
        out = F.linear(x.float(), self.weight, self.bias)
        return _ACTIVATIONS[self.activation](out)


def load_dense(
    modules: Sequence[DenseModule], device: torch.device, *, dummy: bool, seed: int
) -> list[Dense]:
    """Returns the products of a model.

    Args:
        modules: their settings.
        device: where they compute.
        dummy: whether weights are random.
        seed: seed of random weights.

    Raises:
        ModelError: a tensor is missing or misshapen.
    """
    return [_load(module, device, dummy, seed) for module in modules]


def _load(module: DenseModule, device: torch.device, dummy: bool, seed: int) -> Dense:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
    if module.bias:
        shapes["linear.bias"] = (module.outputs,)
    if dummy:
        draw = torch.Generator().manual_seed(seed)
        found = {name: torch.randn(shape, generator=draw) * 0.02 for name, shape in shapes.items()}
    else:
        found = _tensors(module)
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape:
            stored = tuple(found[name].shape) if name in found else "nothing"
            raise ModelError(f"{module.folder}: {name} has {stored}, expected {shape}")
    weight, bias = (
        found[name].float().to(device) if name in shapes else None
        for name in ("linear.weight", "linear.bias")
    )
    assert weight is not None
    return Dense(weight, bias, module.activation)


def _tensors(module: DenseModule) -> dict[str, Tensor]:
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(module.folder)]
        return {
            name: file.get_tensor(name).clone() for file in files for name in sorted(file.keys())
        }
