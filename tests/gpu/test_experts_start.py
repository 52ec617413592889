"""Experts on a GPU: tiles measured at the start, and the shared expert on a parallel stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire import ops
from quire.layers.build import Build
from quire.layers.experts import Experts, ExpertsSpec
from quire.layers.norm import NormSpec
from quire.layers.residual import Residual
from quire.ops.experts import Routing
from quire.ops.reference import experts as twins
from quire.ops.triton.experts import plan
from quire.ops.triton.experts.kernels import add_gated
from quire.ops.triton.experts.plan import RANGES, ExpertsShape, chosen_plan, plan_for
from quire.ops.triton.experts.tune import known_or_measured
from quire.parallel import SingleGroup
from quire.quantization import Quantization
from quire.quantization.checkpoint_tensor import FLOATS, CheckpointTensor
from quire.quantization.quantization import Scheme, Unquantized
from quire.runner.expert_tiles import tuned

DEVICE = torch.device("cuda", 0)
FORMATS = {
    "bfloat16": ops.WeightFormat(torch.bfloat16),
    "int4": ops.WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128),
}


class InFormat:
    """Stores all weights in one format."""

    def __init__(self, format: ops.WeightFormat) -> None:
        self.format = format

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(self.format, (CheckpointTensor("weight", "values", FLOATS),))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan, "_measured", {})
    chosen_plan.cache_clear()
    yield
    chosen_plan.cache_clear()


def layers(count: int, quantization: Quantization, **spec: object) -> list[Experts]:
    torch.manual_seed(0)
    build = Build(SingleGroup(), quantization, DEVICE, torch.bfloat16)
    own = ExpertsSpec(experts=16, width=256, routing=Routing(top_k=4), **spec)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        layer = own.layer(512, build)
        for parameter in layer.parameters():
            if parameter.dtype == torch.uint8:
                parameter.data.random_(0, 256)
            elif parameter.dtype == torch.float16:
                parameter.data.fill_(0.01)
            else:
                parameter.data.normal_(0.0, 0.05)
        found.append(layer)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_measured_tile_matches_the_twin(name: str) -> None:
    own = layers(2, InFormat(FORMATS[name]))
    experts = [tuned(layer) for layer in own]
    began = time.perf_counter()
    found = known_or_measured(experts, 300)
    assert time.perf_counter() - began < 60, name
    assert len(found) == len([tokens for tokens in RANGES if tokens <= 300])
    began = time.perf_counter()
    assert known_or_measured(experts, 300) == found
    assert time.perf_counter() - began < 0.5
    plan.use(found)
    up, down = own[0].up.weights, own[0].down.weights
    for tokens in (1, 2, 7, 40, 200, 300):
        x = torch.randn(tokens, 512, device=DEVICE, dtype=torch.bfloat16)
        scores = torch.rand(tokens, 16, device=DEVICE)
        weights, ids = scores.topk(4, 1)
        ids = ids.int()
        ids[-1, 1] = -1
        policy = ops.Policy()
        with ops.use_policy(policy):
            got = ops.op(twins.experts_mlp)(x, ids, weights, up, down, own[0].spec.act, x)
        want = twins.experts_mlp(x, ids, weights, up, down, own[0].spec.act, x)
        assert (got - want).float().norm() / want.float().norm() < 2e-2, tokens


def test_a_shape_without_measurements_follows_rules() -> None:
    shape = ExpertsShape(4, 8, 2, 64, 64, torch.bfloat16, 16, format="bfloat16")
    assert chosen_plan(shape) == plan_for(shape)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 64, 200])
def test_the_shared_expert_on_a_branch_has_the_same_bits(tokens: int, gated: bool) -> None:
    own = layers(3, Unquantized(), shared_width=128, shared_gate=gated)
    build = Build(SingleGroup(), Unquantized(), DEVICE, torch.bfloat16)
    norm = NormSpec(kind="rms", eps=1e-6).layer(512, build)
    norm.weight.data.fill_(1.0)
    live = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    batch = type("Batch", (), {"query_start": live})()
    start = torch.randn(tokens, 512, device=DEVICE, dtype=torch.bfloat16)
    x = start.clone()

    def run() -> torch.Tensor:
        y = Residual(x)
        for layer in own:
            y = layer(y, norm, batch)
        return y.total()

    with torch.inference_mode(), ops.use_policy(ops.Policy()):
        want = run().clone()
        x.copy_(start)
        run()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            got = run()
            graph.capture_end()
        for _ in range(50):
            x.copy_(start)
            graph.replay()
            assert torch.equal(got, want)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (5, 520), (300, 7168)])
def test_the_gate_of_the_shared_expert(tokens: int, hidden: int, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, y, residual = torch.randn(3, tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(1, hidden, device=DEVICE, dtype=torch.bfloat16) * hidden**-0.5
    more = residual if with_residual else None
    got = add_gated(y, x, weight, more)
    want = twins.add_gated(
        y.double(), x.double(), weight.double(), None if more is None else more.double()
    )
    assert (got.double() - want).norm() / want.norm() < 1e-2
