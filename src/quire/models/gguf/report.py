"""Describes the weight formats to which a GGUF file was converted, for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from quire.layers.expert_weights import ExpertLinear
from quire.layers.linear import Linear
from quire.ops import Weight


def describe(types: Iterable[str], model: nn.Module) -> str:
    """Returns a sentence that lists the types in the file, and the bytes of each weight format on
    the device."""
    stored = ", ".join(f"{count} {name}" for name, count in Counter(types).most_common())
    sizes: Counter[str] = Counter()
    for weight in _weights(model):
        parts: list[Tensor | None] = [weight.values, weight.scales, weight.zeros]
        sizes[weight.format.key] += sum(part.nbytes for part in parts if part is not None)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    sizes["other parameters"] = whole - sum(sizes.values())
    held = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items() if size > 0)
    return f"GGUF tensors: {stored}; on the device {whole / 1e6:.1f} MB: {held}"


def _weights(model: nn.Module) -> Iterator[Weight]:
    """Yields the weights of linear layers, except tied heads, whose weight is the embeddings."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.tied:
            yield from module.weights
        elif isinstance(module, ExpertLinear):
            yield module.weight
