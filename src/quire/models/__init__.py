"""Models: everything from a folder to a running decoder."""

from __future__ import annotations

from typing import Any

import torch

from quire.layers.attention import KVLayout
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.models.config import load_config, resolve_model_path, spec_from_config
from quire.models.decoder import Decoder
from quire.models.encoder import Encoder
from quire.models.quantization import model_quantization
from quire.models.spec import EncoderSpec, ModelSpec
from quire.models.weights import load_weights
from quire.parallel import ProcessGroup, SingleGroup
from quire.quantization import Quantization, Unquantized

__all__ = [
    "Decoder",
    "Encoder",
    "EncoderSpec",
    "ForwardBatch",
    "GroupBatch",
    "KVLayout",
    "ModelSpec",
    "build_model",
    "load_config",
    "load_weights",
    "model_quantization",
    "resolve_model_path",
    "spec_from_config",
]


def build_model(
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    quantization: Quantization | None = None,
    expert_parallel: bool = False,
    drafts: int = 0,
) -> Decoder:
    """Returns a model with uninitialized weights: an `Encoder` for an `EncoderSpec`.

    An encoder has the interface of a decoder, without logits.

    Args:
        spec: the model.
        device: "meta" builds only shapes.
        dtype: dtype of activations, by default the checkpoint's.
        group: the ranks that share the layers, by default this process alone.
        quantization: chooses weight formats; None stores floats.
        expert_parallel: see `Build`.
        drafts: see `Build`.
    """
    build = Build(
        group=group or SingleGroup(),
        quantization=quantization or Unquantized(),
        device=torch.device(device),
        dtype=dtype or spec.dtype,
        expert_parallel=expert_parallel,
        drafts=drafts,
    )
    kind: Any = Encoder if isinstance(spec, EncoderSpec) else Decoder
    return kind(spec, build).eval()  # type: ignore[no-any-return]
