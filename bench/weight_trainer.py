"""A trainer's process for `weight_updates.py`: random tensors on a GPU, sent to an engine.

Each line of stdin is a command; each line of stdout answers one.

    {"tensors": {name: shape}, "device": "cuda:1"}   makes the tensors
    "ipc"                                            answers with a `CudaIpcSource`
    {"group": JoinGroup, "times": 2}                 opens a group, and broadcasts all tensors
    "end"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.features.weight_updates.broadcast_group import BroadcastGroup
from quire.features.weight_updates.payloads import JoinGroup
from quire.features.weight_updates.trainer import cuda_ipc_source


def random_tensors(
    shapes: Mapping[str, Sequence[int]], device: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields the same tensors in every process. Those of one dimension are ones."""
    draw = torch.Generator(device=device).manual_seed(7)
    for name, shape in shapes.items():
        made = torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)
        yield name, made.fill_(1.0) if len(shape) == 1 else made.normal_(0, 0.02, generator=draw)


def answer(found: Any) -> None:
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    tensors: dict[str, Tensor] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == "end":
            return
        if asked == "ipc":
            answer(cuda_ipc_source(tensors.items()))
        elif "tensors" in asked:
            torch.cuda.set_device(asked["device"])
            tensors.update(random_tensors(asked["tensors"], asked["device"]))
            torch.cuda.synchronize()
            answer("made")
        else:
            wanted = msgspec.convert(asked["group"], JoinGroup)
            group = BroadcastGroup(wanted, 0, torch.device("cuda"), serves=True)
            answer("open")
            for _ in range(asked["times"]):
                group.send(list(tensors.values()))
            torch.cuda.synchronize()
            answer("sent")


if __name__ == "__main__":
    main()
