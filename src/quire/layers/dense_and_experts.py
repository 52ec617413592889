"""Feed-forward layers with a dense part and experts in parallel, each with its own norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from quire import ops
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.expert_weights import fp32_parameter
from quire.layers.experts import Experts, ExpertsSpec
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec, RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.ops.experts import Routed
from quire.ops.reference import experts as twins

_experts_mlp = ops.op(twins.experts_mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndExpertsSpec:
    """norm(dense(x)) + norm(experts(norm(x))), as in Gemma 4.

    Attributes:
        dense: the dense part.
        experts: the experts and their router.
        norm: settings of the norms on both parts' outputs, the experts' input and the router's
            input.
    """

    dense: MlpSpec
    experts: ExpertsSpec
    norm: NormSpec

    def layer(self, hidden: int, build: Build) -> DenseAndExperts:
        """Returns the layer, for hidden states of this width."""
        return DenseAndExperts(self, hidden, build)


class DenseAndExperts(nn.Module):
    """A dense layer and experts in parallel.

    Each expert has a learned scale, by which its routing weight is multiplied.
    """

    def __init__(self, spec: DenseAndExpertsSpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.dense = spec.dense.layer(hidden, build.within("dense"))
        self.experts = Experts(spec.experts, hidden, build.within("experts"))
        self.hidden = hidden

        def norm(name: str) -> RMSNorm:
            return spec.norm.layer(hidden, build.within(name))

        self.dense_out_norm = norm("dense_out_norm")
        self.experts_norm = norm("experts_norm")
        self.experts_out_norm = norm("experts_out_norm")
        self.router_norm = norm("router_norm")
        # The router expects inputs of length 1.
        self.router_norm.factor = hidden**-0.5
        self.expert_scale = fp32_parameter(spec.experts.experts, build)

    def forward(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Residual:
        """Returns the sum of both parts' outputs, [T, hidden], without x."""
        stream, experts = x.total(), self.experts
        delta_only = Residual(stream, delta_only=True)
        dense = self.dense_out_norm(self.dense(delta_only, norm, batch).total())
        taken = self.router_norm(stream)
        _, ids, weights = experts.router(taken, None, batch.query_start[-1:])
        scales = self.expert_scale[ids.clamp(min=0).long() + experts.router.local[0]]
        routed = Routed(self.experts_norm(stream), ids, weights * scales)
        if ops.current_policy().deterministic:
            out = experts.fixed_sum(routed, None)
        else:
            out = _experts_mlp(*routed, experts.up.weights, experts.down.weights, experts.spec.act)
            if experts.group.world > 1:
                out = experts.group.all_reduce(out, None, experts.name)
        return Residual(dense.add_(self.experts_out_norm(out)))

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the parameters of this module itself."""
        yield ParameterSlice.for_tensor("expert_scale", self.expert_scale.data, initial="ones")

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        parts: int = self.dense.workspace_bytes(tokens) + self.experts.workspace_bytes(tokens)
        return parts + 4 * 4 * tokens * self.hidden
