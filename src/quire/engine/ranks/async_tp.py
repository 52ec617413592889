"""`--async-tp`: decides whether an engine computes long steps as two halves, and how long ones."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from quire.config import EngineArgs, EngineConfig
from quire.engine.loop.features import enabled_features
from quire.errors import ConfigError
from quire.layers.async_tp import HalvesGroup, first_half
from quire.layers.attention import AttentionSpec
from quire.layers.experts import ExpertsSpec
from quire.layers.latent_attention import LatentAttentionSpec
from quire.layers.mlp import MlpSpec
from quire.models import ModelSpec, load_config, spec_from_config
from quire.models.spec import LayerSpec
from quire.parallel.torch_group import TorchGroup

logger = logging.getLogger("quire.parallel")

LEAST = 1024
"""With `on`, a GPU computes steps of at least this many tokens as two halves. In shorter steps a
product of half the tokens takes nearly as long as the whole."""
_LEAST_ON_CPU = 16
"""The same limit for a CPU. Nothing overlaps there, so the setting is only for tests."""


def check_async_tp(args: EngineArgs, spec: ModelSpec) -> None:
    """Checks that steps can be computed as two halves if async_tp is `on`.

    Raises:
        ConfigError: they cannot. The message names the reason.
    """
    reason = obstacle(args, spec)
    if reason is not None:
        raise ConfigError(f"async_tp=on {reason}", "async_tp")


def obstacle(args: EngineArgs, spec: ModelSpec) -> str | None:
    """Returns the reason why steps cannot be computed as two halves; None if they can."""
    if args.tensor_parallel_size == 1:
        return "needs tensor_parallel_size of at least 2: it overlaps sums over ranks"
    for feature in enabled_features(args):
        if feature.whole_steps:
            return f"is not supported with {feature.whole_steps}"
    for index, layer in enumerate(spec.layers):
        reason = _of_layer(layer)
        if reason is not None:
            return f"is not supported for {spec.architecture}: layer {index} {reason}"
    return None


def _of_layer(layer: LayerSpec) -> str | None:
    """Returns the reason why a layer does not consist of two parts that each end with a sum over
    ranks; None if it does."""
    if layer.norms != "input" or layer.parallel or layer.multiplier != 1.0:
        return "is not a plain layer, whose parts each end with a sum over ranks and the residual"
    if not isinstance(layer.mixer, AttentionSpec | LatentAttentionSpec):
        return "is recurrent, and its state cannot be split within a step"
    ffn = layer.ffn
    if isinstance(ffn, ExpertsSpec) and ffn.shared_width and not ffn.shared_gate:
        return "has a shared expert, whose sum comes before that of the others"
    if not isinstance(ffn, MlpSpec | ExpertsSpec):
        return "has a feed-forward part of another kind"
    return None


def halves_group(config: EngineConfig, group: TorchGroup) -> TorchGroup:
    """Returns the tensor-parallel group, with sums that overlap other work where possible.

    It returns `group` itself if the model does not allow the overlap. "auto" is measured, and
    therefore also needs a GPU that captures graphs.
    """
    args, device = config.args, torch.device(config.device)
    reason = obstacle(args, spec_from_config(load_config(Path(config.model_path))))
    measured = args.async_tp == "auto"
    if reason is None and measured and device.type == "cpu":
        reason = "has nothing to gain on a CPU"
    elif reason is None and measured and config.eager:
        reason = "is not measured without graphs"
    if reason is not None:
        logger.info("async_tp=%s %s: off", args.async_tp, reason)
        return group
    if device.type == "cpu":
        halves = HalvesGroup(group, _LEAST_ON_CPU, device, measured=False)
    else:
        # `exchange` imports Triton, which a CPU does not have.
        from quire.parallel.exchange import make_exchange

        tokens = config.scheduler.max_num_batched_tokens
        dtype: torch.dtype = getattr(torch, config.dtype)
        width, second = config.hidden_size, tokens - first_half(tokens)
        exchange = make_exchange(group, second, width, dtype, device)
        least = sys.maxsize if measured else LEAST
        halves = HalvesGroup(group, least, device, exchange, measured=measured)
    if not measured:
        logger.info("async_tp=on: %s", halves.described)
    return halves
