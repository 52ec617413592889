"""Computes the least work of a model's steps from the model's shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.engine.ranks.ranks import model_of_rank
from quire.layers.attention import KVLayout
from quire.layers.experts import Experts
from quire.layers.gated_delta import StateLayout
from quire.layers.latent_attention import LatentLayout
from quire.layers.layout import block_bytes
from quire.layers.linear import Linear
from quire.models import load_config, model_quantization, spec_from_config
from quire.ops import KVFormat, WeightFormat
from quire.tools.bench.work import AttentionWork, ExpertsWork, ModelWork, Products

_CHUNK = 64
"""Tokens of a chunk of a prompt in a gated delta net."""


def model_work(config: EngineConfig) -> ModelWork:
    """Returns the work of a model on one rank."""
    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    dtype = getattr(torch, config.dtype)
    quantization = model_quantization(config.model_path, hf_config, spec, config.args.quantization)
    world = config.args.tensor_parallel_size
    model = model_of_rank(spec, quantization, world, dtype)
    head, tied = spec.vocab_size * spec.hidden_size // world, model.head.tied
    outside = {"embedding", "positions", "head"}
    body_bytes = sum(
        parameter.numel() * parameter.dtype.itemsize
        for name, parameter in model.named_parameters()
        if name.partition(".")[0] not in outside
    )
    modules = list(model.layers.modules())
    linear = [module for module in modules if isinstance(module, Linear)]
    products = sum((each.columns[1] - each.columns[0]) * sum(each.sizes) for each in linear)
    experts = _experts_work([module for module in modules if isinstance(module, Experts)])
    layouts = [block.attention.layout for block in model.layers]
    states = [layout for layout in layouts if isinstance(layout, StateLayout)]
    attention = [
        _attention_work(layout, dtype)
        for layout in layouts
        if isinstance(layout, KVLayout | LatentLayout)
    ]
    return ModelWork(
        body_bytes=body_bytes - experts.bytes,
        head_bytes=sum(
            own.nbytes for own in (model.embedding if tied else model.head).parameters()
        ),
        body_flops=2 * products,
        head_flops=2 * head,
        embedding_bytes=spec.hidden_size * dtype.itemsize,
        linear_layers=len(linear),
        attention=tuple(Counter(attention).items()),
        experts=experts,
        state_layers=len(states),
        state_bytes=sum(block_bytes(state, 1, KVFormat(dtype)) for state in states),
        state_flops=sum(_state_flops(state) for state in states),
        tied=tied,
        body_products=_products(linear),
        head_products="plain" if tied else _products([model.head]),
    )


def _products(layers: Sequence[Linear]) -> Products:
    """Returns the products of most of the layers' weights."""
    counts: Counter[WeightFormat] = Counter()
    for weight in (weight for layer in layers for weight in layer.weights):
        counts[weight.format] += weight.outputs * weight.inputs
    stored = max(counts, key=counts.__getitem__)
    if stored.scales is None:
        return "plain"
    if stored.inputs != "none":
        return "blocks" if stored.inputs == "group" else "rounded"
    floats = stored.values.is_floating_point or stored.code != "integer"
    return "floats" if floats else "integers"


def _attention_work(layout: KVLayout | LatentLayout, dtype: torch.dtype) -> AttentionWork:
    # A whole latent is the key, and a part of it is the value.
    width = 2 * layout.head_dim if isinstance(layout, KVLayout) else layout.width + layout.rank
    kept = block_bytes(layout, 1, KVFormat(dtype))
    return AttentionWork(layout.window, kept, 2 * layout.query_heads * width)


def _experts_work(layers: Sequence[Experts]) -> ExpertsWork:
    if not layers:
        return ExpertsWork()
    parts = [part for layer in layers for part in (layer.up, layer.down)]
    stored = sum(p.numel() * p.dtype.itemsize for part in parts for p in part.parameters())
    spec = layers[0].spec
    share = spec.routing.top_k / spec.experts
    products = sum(part.weight.outputs * part.weight.inputs for part in parts)
    return ExpertsWork(len(layers), stored, share, 2.0 * products * share)


def _state_flops(state: StateLayout) -> int:
    """Returns the FLOPs of a token: products with the state, and with the tokens of its chunk."""
    key, value = state.key_dim, state.value_dim
    return state.value_heads * (6 * key * value + 4 * _CHUNK * (key + value))
