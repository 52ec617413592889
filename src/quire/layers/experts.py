"""Mixture-of-experts layers (Shazeer et al. 2017): a router chooses each token's experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.expert_weights import (
    ExpertLinear,
    ExpertShard,
    Layout,
    even_shard,
    experts_scheme,
    fp32_parameter,
)
from quire.layers.fixed_sums import experts_in_order
from quire.layers.linear import Linear, Output
from quire.layers.norm import RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import DeferredAllReduce, PartialSum, Residual
from quire.ops.branch import start_branch
from quire.ops.experts import SILU, ExpertCopies, Routed, Routing, Swiglu
from quire.ops.reference import experts as twins
from quire.ops.reference.dense import sigmoid

_route = ops.op(twins.route)
_experts_mlp = ops.op(twins.experts_mlp)
_add_gated = ops.op(twins.add_gated)

_ROUTER_PARTS = 8
"""Most partial logits per expert that the router's kernel adds up, for the workspace."""
_SIDE_STREAM_TOKENS = 256
"""Up to this many tokens, the shared expert runs on a second stream. With more tokens the other
experts fill a GPU by themselves."""
_UNIT = 16
"""Ranks split an expert's hidden units in multiples of this, unless a rank would get no units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A layer of experts, each a gated feed-forward layer.

    Attributes:
        experts: number of experts.
        width: hidden units of each expert.
        routing: how many experts a token gets, and their weights.
        act: the gated activation.
        bias: whether the experts have biases.
        router_bias: whether the router has a bias.
        correction: whether the router has a bias per expert that affects only the choice of
            experts, not their weights (DeepSeek-V3).
        shared_width: hidden units of the shared expert, which every token gets; 0 without one.
        shared_gate: whether the shared expert's output is multiplied by a sigmoid gate.
        layout: layout of the checkpoint's tensors.
    """

    experts: int
    width: int
    routing: Routing
    act: Swiglu = SILU
    bias: bool = False
    router_bias: bool = False
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    layout: Layout = "each"

    def layer(self, hidden: int, build: Build) -> Experts:
        """Returns the layer, for hidden states of this width."""
        return Experts(self, hidden, build)


class Router(nn.Module):
    """Chooses each token's experts. Every rank holds the whole router.

    Attributes:
        local: [first, end) of the experts on this rank.
        copies: the places of all experts if ranks hold copies of some experts, else None.
        ids: int32 [tokens, k], memory in which the ids of a step's experts stay readable, or None.
    """

    def __init__(
        self, spec: ExpertsSpec, hidden: int, local: tuple[int, int], build: Build
    ) -> None:
        super().__init__()
        self.routing = spec.routing
        self.local = local
        self.copies: ExpertCopies | None = None
        self.ids: Tensor | None = None
        self.weight = build.empty(spec.experts, hidden)
        self.bias = build.empty(spec.experts) if spec.router_bias else None
        self.correction = fp32_parameter(spec.experts, build) if spec.correction else None

    def forward(self, x: Tensor, norm: RMSNorm | None, live: Tensor) -> Routed:
        """Returns norm(x), and the ids and weights of each token's experts.

        Args:
            x: [T, hidden].
            norm: the norm before the layer, or None.
            live: int32 [1], number of real tokens. The other tokens are padding and get no experts.
        """
        scale = None if norm is None else norm.scale
        if norm is not None and scale is None:
            x = norm(x)
        return _route(
            x,
            self.weight,
            self.routing,
            live=live,
            norm=scale,
            bias=self.bias,
            correction=self.correction,
            first=self.local[0],
            count=self.local[1] - self.local[0],
            copies=self.copies,
            ids=None if self.ids is None else self.ids[: len(x)],
        )

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.for_tensor("weight", self.weight.data)
        if self.bias is not None:
            yield ParameterSlice.for_tensor("bias", self.bias.data)
        if self.correction is not None:
            yield ParameterSlice.for_tensor("correction", self.correction.data, initial="zeros")


class Experts(nn.Module):
    """The sum of weight * down(act(up(x))) over a token's experts, plus the shared expert's output.

    Ranks split the hidden units of every expert. With `Build.expert_parallel` each rank holds whole
    experts instead.
    """

    def __init__(self, spec: ExpertsSpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.hidden = hidden
        self.group = build.group
        self.name = build.name
        rank, world = build.group.rank, build.group.world
        up, down = build.within("up"), build.within("down")
        up_scheme = experts_scheme(("gate", "up"), spec.layout, up, spec.experts)
        down_scheme = experts_scheme(("",), spec.layout, down, spec.experts)
        local, width = (0, spec.experts), (0, spec.width)
        if build.expert_parallel:
            local = even_shard(spec.experts, 1, rank, world)
        else:
            unit = down_scheme.format.group or (_UNIT if spec.width >= _UNIT * world else 1)
            width = even_shard(spec.width, unit, rank, world)
        if local[0] == local[1] or width[0] == width[1]:
            raise ConfigError(
                f"{build.name}: {spec.experts} experts of {spec.width} hidden units cannot be "
                f"split over {world} ranks",
                "tensor_parallel_size",
            )
        self.router = Router(spec, hidden, local, build.within("router"))
        self.up = ExpertLinear(
            ("gate", "up"),
            ExpertShard(local, width, (0, hidden), spec.experts, spec.width, hidden),
            up_scheme,
            spec.layout,
            up,
            bias=spec.bias,
        )
        self.down = ExpertLinear(
            ("",),
            ExpertShard(local, (0, hidden), width, spec.experts, hidden, spec.width),
            down_scheme,
            spec.layout,
            down,
            bias=spec.bias,
        )
        self.shared: SharedExpert | None = None
        if spec.shared_width:
            self.shared = SharedExpert(spec, hidden, build.within("shared"))

    def forward(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Residual:
        """Returns x + experts(norm(x)), [T, hidden], or experts(norm(x)) if x is `delta_only`."""
        inputs, norm = x.layer_input(norm)
        stream = x.total()
        onto = None if x.delta_only else stream
        routed: Routed = self.router(inputs, norm, batch.query_start[-1:])
        up, down, act = self.up.weights, self.down.weights, self.spec.act
        alone, fixed = self.group.world == 1, ops.current_policy().deterministic
        if self.shared is not None and alone and not fixed and len(stream) <= _SIDE_STREAM_TOKENS:
            sum_of_shared = start_branch(self.shared, routed.x, onto)
            return Residual(_experts_mlp(*routed, up, down, act, sum_of_shared))
        if self.shared is not None:
            onto = self.shared(routed.x, onto)
        if fixed:
            return Residual(self.fixed_sum(routed, onto))
        out = _experts_mlp(*routed, up, down, act, onto if alone else None)
        if not (alone or onto is None or self.group.all_reduce_norm is None):
            return DeferredAllReduce(onto, pending=PartialSum(out, self.group, self.name))
        return Residual(out if alone else self.group.all_reduce(out, onto, self.name))

    def fixed_sum(self, routed: Routed, residual: Tensor | None) -> Tensor:
        """Returns residual + experts(x), [T, hidden], with equal bits for any number of ranks."""
        return experts_in_order(
            routed, self.up.weights, self.down.weights, self.spec.act, residual, self.spec.width,
            self.group,
        )  # fmt: skip

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        rows = tokens * self.spec.routing.top_k
        own = 4 * tokens * (2 * self.hidden + _ROUTER_PARTS * self.spec.experts) + 32 * rows
        # The activation may run as its own kernel, with an input and an output.
        own += 2 * self.up.workspace_bytes(rows) + self.down.workspace_bytes(rows + tokens)
        own += max(self.up.expanded_bytes(rows), self.down.expanded_bytes(rows))
        return own + (0 if self.shared is None else self.shared.workspace_bytes(tokens))


class SharedExpert(nn.Module):
    """The expert that every token gets, with a gate if `ExpertsSpec.shared_gate` is set."""

    def __init__(self, spec: ExpertsSpec, hidden: int, build: Build) -> None:
        super().__init__()
        width = spec.shared_width
        outputs = [Output("gate", width), Output("up", width)]
        self.up = Linear(hidden, outputs, build.within("up"), bias=False, split="outputs")
        self.down = Linear(width, hidden, build.within("down"), bias=False, split="inputs")
        self.gate: SharedGate | None = None
        if spec.shared_gate:
            self.gate = SharedGate(hidden, build)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns gate(x) * expert(x), [T, hidden], plus the residual if it is not None.

        Args:
            x: [T, hidden], after the norm.
            residual: [T, hidden] or None.
        """
        inner = self.up(x, act="silu_and_mul")
        if self.gate is None and residual is not None:
            return self.down.add(inner, Residual(residual)).total()
        out: Tensor = self.down(inner)
        return out if self.gate is None else self.gate(out, x, residual)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        return 2 * self.up.workspace_bytes(tokens) + 2 * self.down.workspace_bytes(tokens)


class SharedGate(nn.Module):
    """The sigmoid of a projection to one number per token. Every rank holds the whole weight."""

    def __init__(self, hidden: int, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(1, hidden)

    def forward(self, y: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns y * gate(x), [T, hidden], plus the residual if it is given. May overwrite y."""
        if not ops.current_policy().deterministic:
            return _add_gated(y, x, self.weight, residual)
        gate = sigmoid(ops.linear(x, ops.Weight.plain(self.weight)).float())
        y = y.mul_(gate.to(x.dtype))
        return y if residual is None else y.add_(residual)

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.for_tensor("weight", self.weight.data)
