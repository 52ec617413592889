"""Settings of engines that run an encoder: refused ones, and those that whole texts determine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineArgs
from quire.engine.loop.features import enabled_features
from quire.errors import ConfigError
from quire.features.pooling.sentence_files import read_sentence_files
from quire.features.spec import resolve

if TYPE_CHECKING:
    from quire.models import EncoderSpec

_REASONS = {
    "pipeline_parallel_size": "its layers are on one stage",
    "enable_expert_parallel": "it has no experts",
    "async_tp": "its steps are not cut into halves",
    "kv_cache_dtype": "it keeps no KV",
    "num_kv_blocks": "it keeps no KV",
    "block_size": "it keeps no KV",
    "deterministic": "its attention has no kernel with a fixed order of sums",
}
"""Settings that encoders refuse, each with the reason."""


def encoder_args(args: EngineArgs, spec: EncoderSpec, folder: Path) -> EngineArgs:
    """Returns the settings with which an encoder runs. Each text is one row of one step.

    Args:
        args: the user's settings.
        spec: the encoder.
        folder: the model's folder.

    Raises:
        ConfigError: a setting has no meaning for an encoder.
    """
    _refuse(args)
    longest = read_sentence_files(folder).longest or spec.max_positions
    length = args.max_model_len or min(longest, spec.max_positions)
    budget = args.max_num_batched_tokens
    if budget is not None and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length}: an encoder "
            "computes a text in one step",
            "max_num_batched_tokens",
        )
    return args.replace(
        max_model_len=length, enable_prefix_caching=False, enable_chunked_prefill=False
    )


def check_encoder_dtype(args: EngineArgs, device: str, dtype: str) -> None:
    """Raises ConfigError for fp32 on a GPU with graphs: no kernel attends in fp32 within one."""
    captured = not args.enforce_eager and "graphs" not in args.disable
    if device != "cpu" and dtype == "float32" and captured:
        raise ConfigError(
            "dtype=float32 is not supported for an encoder in CUDA graphs; use float16, or "
            "enforce_eager",
            "dtype",
        )


def encoder_block_size(longest: int) -> int:
    """Returns the tokens of a block that holds any text. An encoder's blocks have no bytes."""
    return 1 << max(4, (longest - 1).bit_length())


def _refuse(args: EngineArgs) -> None:
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name, reason in _REASONS.items():
        if getattr(args, name) != defaults[name]:
            raise ConfigError(
                f"{name}={getattr(args, name)} is not supported for an encoder: {reason}", name
            )
    for feature in enabled_features(args):
        if feature.name == "ranks":
            continue
        own = [each.name for each in dataclasses.fields(resolve(feature.args))]
        name = next((name for name in own if getattr(args, name) != defaults[name]), own[0])
        raise ConfigError(
            f"{name} is not supported for an encoder, which generates nothing and keeps no KV",
            name,
        )
