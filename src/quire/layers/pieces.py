"""What a module tells the loader about its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from quire.sharding import REPLICATED, ShardSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint, as the layer that owns it sees it.

    name: below the module's own name, such as `q.weight`.
    target: where this rank's share goes, a view into the (perhaps stacked) parameter.
    shape: of the whole tensor. shard: how ranks split it.
    initial: what random weights are made of; norms start as the identity.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    shard: ShardSpec = REPLICATED
    initial: Literal["random", "ones", "zeros"] = "random"


@runtime_checkable
class Loadable(Protocol):
    def pieces(self) -> Iterator[Piece]: ...


def named_pieces(model: nn.Module) -> Iterator[tuple[str, Piece]]:
    """Every piece of `model` under its full name, such as `layers.0.attention.qkv.q.weight`."""
    for prefix, module in model.named_modules():
        if isinstance(module, Loadable):
            for piece in module.pieces():
                yield (f"{prefix}.{piece.name}" if prefix else piece.name), piece
