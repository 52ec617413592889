"""Multi-token prediction: an extra layer, trained with the model, that predicts one more token
(DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 2.2).

The layer's input is x = fc [norm(embedding of the next token), norm(the target's final normed
state)]. Its normed output goes to the target's head. When the layer drafts further, its normed
output also replaces the target's state.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.gated_delta import GatedDeltaSpec
from quire.layers.linear import Linear
from quire.models.config import family_named, load_config
from quire.models.decoder import Decoder
from quire.models.draft_heads.draft_head import DraftHead, share_equal, whole
from quire.models.families import settings
from quire.models.families.family import Family, Source
from quire.models.files import open_file, weight_files
from quire.models.quantization import checkpoint_quantization
from quire.models.spec import LayerSpec, ModelSpec
from quire.models.weights import load_weights
from quire.quantization import Quantization, quantization_of


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of the layer's tensors in a family's checkpoints.

    Attributes:
        count: key of config.json with the number of such layers.
        block: prefix of the layer's own tensors. {n} stands for the number of the model's layers.
        parts: prefixes of the other tensors, without `weight`, by part. `embedding` and `head` are
            optional.
    """

    count: str
    block: str
    parts: Mapping[str, str]


_NEXTN = MtpLayout(
    count="num_nextn_predict_layers",
    block="model.layers.{n}.",
    parts={
        "fc": "model.layers.{n}.eh_proj",
        "embedding_norm": "model.layers.{n}.enorm",
        "hidden_norm": "model.layers.{n}.hnorm",
        "norm": "model.layers.{n}.shared_head.norm",
        "embedding": "model.layers.{n}.embed_tokens",
        "head": "model.layers.{n}.shared_head.head",
    },
)
_QWEN = MtpLayout(
    count="mtp_num_hidden_layers",
    block="mtp.layers.0.",
    parts={
        "fc": "mtp.fc",
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
    },
)
_LAYOUTS = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}
"""The layouts by family."""
_SHARED = "embedding", "head"


class MtpHead(DraftHead):
    """The layer, a norm for each part of a pair, and the projection `fc` that joins the parts."""

    def __init__(self, spec: ModelSpec, target: Decoder, build: Build) -> None:
        super().__init__(spec, target, build)
        width, every_rank = spec.hidden_size, whole(build)
        self.embedding_norm = spec.norm.layer(width, build.within("embedding_norm"))
        self.hidden_norm = spec.norm.layer(width, build.within("hidden_norm"))
        where = every_rank.within("fc")
        self.fc = Linear(2 * width, width, where, bias=False, split="outputs")

    def forward(
        self, batch: ForwardBatch, kv: Sequence[Any], *, hidden: Tensor, shallow: bool = False
    ) -> Tensor:
        """See `DraftHead.forward`."""
        embedded = self.embedding_norm(self.embed(batch.input_ids))
        joined = self.fc(torch.cat([embedded, self.hidden_norm(hidden)], dim=1))
        given: Tensor = self.norm(self.run(joined, batch, kv, shallow))
        return given


def mtp_layers(config: Mapping[str, Any], target: ModelSpec) -> int:
    """Returns the number of MTP layers according to config.json, by default 0."""
    layout = _LAYOUTS.get(target.family)
    return 0 if layout is None else settings.integer(_text(config), layout.count, 0, low=0)


def check_mtp(folder: Path, target: ModelSpec, load_format: str) -> None:
    """Checks that the checkpoint has one MTP layer.

    Raises:
        ModelError: there is no MTP layer, there are several, or a tensor is missing.
    """
    layout = _LAYOUTS.get(target.family)
    if layout is None:
        families = ", ".join(sorted(_LAYOUTS))
        raise ModelError(
            f"MTP layers of {target.architecture} are not supported; expected a model of one of "
            f"the families: {families}"
        )
    config = load_config(folder)
    count = mtp_layers(config, target)
    if count > 1:
        raise ModelError(f"config.json: {layout.count}={count}, but one MTP layer is supported")
    if _text(config).get("mtp_use_dedicated_embeddings"):
        raise ModelError("config.json: mtp_use_dedicated_embeddings is not supported")
    if load_format == "dummy":
        return
    family = _target_family(target)
    names = _tensors(folder, family)
    for part, name in layout.parts.items():
        stored = f"{name.format(n=len(target.layers))}.weight"
        # A quantized weight is stored in other tensors, with or without one called `weight`.
        if part not in _SHARED and not any(each.startswith(stored) for each in names):
            raise ModelError(f"the checkpoint has no MTP layer: missing tensor {stored}")


def load_mtp(
    folder: Path,
    target: Decoder,
    build: Callable[[Quantization], Build],
    *,
    wanted: str | None,
    load_format: str,
    seed: int,
) -> MtpHead:
    """Returns the layer of the target's checkpoint, with its weights.

    Args:
        build: maps a quantization to the settings for building the layer.
        wanted: `EngineArgs.quantization`.
        load_format: see `load_weights`.
        seed: see `load_weights`.

    Raises:
        ModelError: the checkpoint has no MTP layer, or the layer does not fit the model. The error
            names a tensor.
    """
    own = target.spec
    check_mtp(folder, own, load_format)
    layout, family = _LAYOUTS[own.family], _target_family(own)
    spec = replace(own, layers=(_last_attention_layer(own),), tied_head=False)
    source = _source(own, layout, family)
    stored = Family(
        name=f"{family.name} MTP",
        spec=family.spec,
        source=source,
        prefixes=family.prefixes,
        ignored=re.compile(""),  # all other tensors are the target's
        head="",
    )
    config = load_config(folder)
    quantization = checkpoint_quantization(folder, config, spec, wanted, stored)
    made = build(quantization or quantization_of(wanted))
    head = MtpHead(spec, target, made)
    if load_format != "dummy":
        names = _tensors(folder, family)
        if source(spec, "embedding.weight").name in names:
            head.own_embedding(made)
        if source(spec, "head.weight").name in names:
            head.own_head(spec.vocab_size, made)
    load_weights(head, folder, load_format, seed, family=stored)
    share_equal(head)
    head.family = stored
    return head


def _source(
    target: ModelSpec, layout: MtpLayout, family: Family
) -> Callable[[ModelSpec, str], Source]:
    """Returns the `Family.source` of the layer. The tensors of its block are named like those of
    the model's layers, with another prefix."""
    count = len(target.layers)
    more = replace(target, layers=(*target.layers, _last_attention_layer(target)))

    def find(spec: ModelSpec, name: str) -> Source:
        part, _, rest = name.partition(".")
        if part == "layers":
            found = family.source(more, f"layers.{count}.{rest.partition('.')[2]}")
            stored = found.name.removeprefix(f"model.layers.{count}.")
            return replace(found, name=layout.block.format(n=count) + stored)
        return Source(f"{layout.parts.get(part, part).format(n=count)}.{rest}")

    return find


def _last_attention_layer(target: ModelSpec) -> LayerSpec:
    """Returns the model's layer whose shape the MTP layer has: the last one with attention."""
    return next(
        layer for layer in reversed(target.layers) if not isinstance(layer.mixer, GatedDeltaSpec)
    )


def _tensors(folder: Path, family: Family) -> set[str]:
    """Returns the canonical names of all tensors of a checkpoint."""
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(folder)]
        return {family.canonical(name) for file in files for name in file.keys()}  # noqa: SIM118


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _target_family(spec: ModelSpec) -> Family:
    family = family_named(spec.family)
    if family is None:
        raise ModelError(f"there is no family {spec.family!r}")
    return family
