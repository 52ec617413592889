"""Tiles of a model's experts, measured at the start of an engine on a GPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from quire import ops
from quire.layers.experts import Experts
from quire.models import Decoder
from quire.ops.triton.experts.plan import PLANS, use
from quire.ops.triton.experts.tune import TunedLayer, known_or_measured
from quire.parallel.torch_group import TorchGroup


def choose_tiles(model: Decoder, most: int) -> None:
    """Chooses tiles for the model's experts in steps of up to `most` tokens.

    Tiles that are missing in the cache directory are measured, which takes seconds. The first rank
    decides for all ranks. Does nothing under a deterministic policy, because its tiles are fixed.
    """
    layers = [tuned(module) for module in model.modules() if isinstance(module, Experts)]
    if not layers or ops.current_policy().deterministic:
        return
    group = model.group
    plans: list[Any] = [None]
    if group.rank == 0:
        plans = [PLANS.dumps("", known_or_measured(layers, most))]
    if isinstance(group, TorchGroup):
        dist.broadcast_object_list(plans, group=group.handle, device=model.device, group_src=0)
    use(PLANS.loads(plans[0]))


def tuned(layer: Experts) -> TunedLayer:
    """Returns the parts of a layer that are measured."""
    return TunedLayer(
        layer.up.weights, layer.down.weights, layer.spec.act, layer.spec.routing.top_k,
        layer.router.local[0], layer.router.weight.dtype,
    )  # fmt: skip
