"""The runner's part: the ids that routers write, and their copy to the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.arrays import int32
from quire.config import EngineConfig
from quire.features.router_replay.args import RouterReplayArgs
from quire.layers.batch import ForwardBatch
from quire.layers.experts import Experts
from quire.models import Decoder
from quire.ops import StepRows
from quire.parallel.torch_group import sum_over_all_ranks
from quire.plan import ChosenExperts, StepPlan
from quire.runner.hooks import Hook, HostHook, ProgramHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState


class RouterReplayHook(ProgramHook, HostHook):
    """Gives each router memory for its ids, which stay there until the next step.

    The routers write the ids anyway, so steps launch one further kernel, for the positions. Only a
    step with a request that asks copies ids to the host.
    """

    def attach(self, model: Decoder) -> None:
        self._layers = [each for each in model.modules() if isinstance(each, Experts)]

    def bind(self, state: BatchState) -> None:
        tokens, device = state.limits.tokens, state.device
        top_k = self._layers[0].spec.routing.top_k
        self._ids = torch.full(
            (len(self._layers), tokens, top_k), -1, dtype=torch.int32, device=device
        )
        for layer, ids in zip(self._layers, self._ids, strict=True):
            layer.router.ids = ids
        self._positions = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self._asked = np.zeros(state.limits.lanes, dtype=np.bool_)

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        for admit in plan.admits:
            self._asked[admit.lane] = admit.params.return_routed_experts

    def batch(self, rows: StepRows, batch: ForwardBatch, altered: bool) -> None:
        # Padding has position 0 too, but no token.
        real = torch.where(batch.input_ids >= 0, batch.positions, -1)
        self._positions[: len(real)].copy_(real)

    def hidden(self, step: Step, hidden: Tensor) -> None:
        asked = self._asked[step.plan.lanes]
        if not asked.any():
            return
        count = int(step.plan.q_len.sum())
        step.send("experts", self._global_ids(count).transpose(0, 1).to(torch.int16).contiguous())
        step.send("experts.positions", self._positions[:count])
        step.notes["experts"] = asked

    def _global_ids(self, count: int) -> Tensor:
        """Returns the ids of the first tokens among the experts of all ranks, [layers, T, k]."""
        ids, layer = self._ids[:, :count], self._layers[0]
        first, end = layer.router.local
        if end - first == layer.spec.experts:
            return ids
        # Each rank has the ids of its own experts. All others are -1 there.
        return sum_over_all_ranks(torch.where(ids >= 0, ids + (first + 1), 0)) - 1

    def read(self, step: Step) -> None:
        ids, positions = step.arrived("experts"), step.arrived("experts.positions")
        if ids is None or positions is None:
            return
        rows = np.repeat(np.arange(step.plan.num_rows), step.plan.q_len)
        kept = step.notes["experts"][rows] & (positions.numpy() >= 0)
        step.result.experts = ChosenExperts(
            int32(rows[kept]), positions.numpy()[kept], ids.numpy()[kept]
        )


def open_hook(config: EngineConfig) -> Hook:
    """Returns the hook for a worker. Without the setting it does nothing."""
    enabled = RouterReplayArgs.of(config.args).enable_return_routed_experts
    return RouterReplayHook() if enabled else Hook()
