"""Random weights for a folder that holds only a config.json.

Each value is a hash of the seed, the tensor's name and the element's index, so that it is the same
on every device, on every rank, and up to rounding in every dtype.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from quire.layers.pieces import Piece, named_pieces
from quire.parallel import ProcessGroup

_DEVIATION = 0.02
_SCALE = _DEVIATION * math.sqrt(3.0) / 2**23


def fill_dummy(model: torch.nn.Module, group: ProcessGroup, seed: int) -> None:
    """Norms become the identity, all else uniform with standard deviation 0.02."""
    for name, piece in named_pieces(model):
        if piece.initial == "ones":
            piece.target.fill_(1.0)
        elif piece.initial == "zeros":
            piece.target.fill_(0.0)
        else:
            _fill(piece, group, _key(seed, name))


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill(piece: Piece, group: ProcessGroup, key: int) -> None:
    target, shape = piece.target, piece.shape
    if target.dim() == 1:
        target, shape = target.unsqueeze(1), (shape[0], 1)
    low = [0, 0]
    if piece.shard.dim is not None:
        start, _ = piece.shard.bounds(shape[piece.shard.dim], group.rank, group.world)
        low[piece.shard.dim] = start
    rows, width = target.shape
    device = target.device
    columns = torch.arange(low[1], low[1] + width, dtype=torch.int32, device=device)
    # On a CPU, a chunk stays in its cache through all of the hash's passes.
    step = max(1, (1 << 15 if device.type == "cpu" else 1 << 24) // width)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        own = torch.arange(low[0] + start, low[0] + end, dtype=torch.int64, device=device)
        index = _wrapped(own * shape[1]).unsqueeze(1) + columns
        target[start:end] = (_hash(index.bitwise_xor_(key)) >> 8).float().mul_(_SCALE)


def _wrapped(x: Tensor) -> Tensor:
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


def _hash(x: Tensor) -> Tensor:
    """Scrambles int32 values in place, by shifts and odd multipliers (the "lowbias32" constants of
    C. Wellons's hash prospector)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
