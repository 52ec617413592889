"""EAGLE-3 heads (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language
Models via Training-Time Test").

The head is one layer. Its attention reads a token's embedding and a hidden state side by side. The
first hidden state is computed from the target's residual streams after three layers: a low, a
middle and a high one. Later it is the head's own output. The head's vocabulary may be a part of the
target's.

Two programs save heads: the authors' code (`midlayer.*`) and the speculators library (`layers.0.*`,
with the layer's settings in `transformer_layer_config`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import NormSpec
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.models.config import load_config
from quire.models.decoder import Decoder
from quire.models.draft_heads.draft_head import DraftHead, share_equal, whole
from quire.models.families import llama, settings, unsupported
from quire.models.families.family import Family, Source
from quire.models.files import open_file, weight_files
from quire.models.spec import ModelSpec
from quire.models.weights import load_weights
from quire.quantization import Quantization, Unquantized

_ARCHITECTURE = re.compile(r"eagle-?3", re.IGNORECASE)
_OUTER = {
    "fc": "fc",
    "input_norm": "input_norm",
    "norm": "norm",
    "embedding": "embed_tokens",
    "head": "lm_head",
}
_PREFIXES = {
    "model.midlayer.": "midlayer.",
    "model.layers.0.": "midlayer.",
    "layers.0.": "midlayer.",
    "model.": "",
}


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 head.

    Attributes:
        model: a model of one layer.
        vocab: tokens that the head can draft.
        taps: see `DraftHead`.
        target_hidden: numbers in the target's hidden states.
        norm_before_fc: whether the concatenated streams are normed before `fc`.
        norm_before_residual: whether the layer's residual is the normed hidden state.
        norm_output: whether the head drafts further from its normed output.
    """

    model: ModelSpec
    vocab: int
    taps: tuple[int, ...]
    target_hidden: int
    norm_before_fc: bool
    norm_before_residual: bool
    norm_output: bool


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes an EAGLE-3 head."""
    names = map(str, config.get("architectures") or [])
    kind = str(config.get("speculators_model_type"))
    return kind == "eagle3" or any(map(_ARCHITECTURE.search, names))


def eagle3_spec(config: Mapping[str, Any], target: ModelSpec) -> Eagle3Spec:
    """Returns the head that a config.json describes.

    Raises:
        ModelError: config.json describes no EAGLE-3 head, or a head for another model. The error
            names the key.
    """
    if not is_eagle3(config):
        raise ModelError(
            "config.json: neither architectures nor speculators_model_type names an EAGLE-3 head"
        )
    layer = config.get("transformer_layer_config")
    nested = isinstance(layer, Mapping)
    own = {**(layer if isinstance(layer, Mapping) else config), "architectures": ["LlamaEagle3"]}
    flags = config.get("eagle_config")
    flags = {**config, **flags} if isinstance(flags, Mapping) else config
    unsupported.check(own, ())
    if settings.integer(own, "num_hidden_layers", 1) != 1:
        raise ModelError("config.json: an EAGLE-3 head of several layers is not supported")
    if settings.flag(flags, "fc_norm", False):
        raise ModelError("config.json: fc_norm=true is not supported")
    if not settings.flag(flags, "use_aux_hidden_state", True):
        raise ModelError("config.json: use_aux_hidden_state=false is not supported")
    vocab = settings.integer(own, "vocab_size", target.vocab_size)
    if vocab != target.vocab_size:
        raise ModelError(
            f"config.json: the head expects a vocabulary of {vocab} tokens, but the model has "
            f"{target.vocab_size}"
        )
    width = settings.integer(config, "target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise ModelError(
            f"config.json: target_hidden_size={width}, but the model is {target.hidden_size} wide"
        )
    base = llama.base_spec({**own, "vocab_size": vocab, "num_hidden_layers": 1}, "llama")
    bias = settings.flag(own, "attention_bias", False)
    base = llama.with_layers(base, {"qkv_bias": bias, "out_bias": bias})
    return Eagle3Spec(
        # The head may draft in texts longer than those it was trained on: every draft is verified.
        model=replace(
            base, tied_head=False, max_positions=max(base.max_positions, target.max_positions)
        ),
        vocab=settings.integer(config, "draft_vocab_size", vocab, high=vocab),
        taps=_taps(flags, target),
        target_hidden=width,
        norm_before_fc=settings.flag(flags, "norm_before_fc", False),
        norm_before_residual=settings.flag(flags, "norm_before_residual", nested),
        norm_output=settings.flag(flags, "norm_output", False),
    )


def _taps(flags: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Returns the numbers, from 1, of the target's layers after which streams are read."""
    count = len(target.layers)
    found = flags.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        found = [2, count // 2, count - 3]
    elif isinstance(found, list) and found and found[0] == 1:
        # A list that begins with layer 0 names layers whose outputs are read. Other lists name
        # layers whose inputs are read.
        found = [index + 1 if type(index) is int else index for index in found]
    if (
        not isinstance(found, list)
        or not found
        or any(type(index) is not int or not 1 <= index <= count for index in found)
    ):
        raise ModelError(
            f"config.json: eagle_aux_hidden_state_layer_ids must name some of the model's {count} "
            f"layers, got {found!r}"
        )
    return tuple(found)


class _PairAttention(Attention):
    """Attention over an embedding and a hidden state side by side, twice as wide as its output."""

    def __init__(
        self, spec: AttentionSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__(spec, hidden, rotary, build)
        where = build.within("qkv")
        self.qkv = Linear(
            2 * hidden, self.outputs(spec), where, bias=spec.qkv_bias, split="outputs"
        )


class _PairBlock(nn.Module):
    """The layer: h + attention(norm(embedding), norm(h)), then h + mlp(norm(h)).

    Args:
        embed: maps token ids to embeddings.
    """

    def __init__(
        self,
        spec: Eagle3Spec,
        rotary: RotaryTable | None,
        build: Build,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        model, layer = spec.model, spec.model.layers[0]
        hidden, mixer = model.hidden_size, layer.mixer
        self._embed, self._norm_before_residual = embed, spec.norm_before_residual
        self.attention_norm = model.norm.layer(hidden, build.within("attention_norm"))
        self.hidden_norm = model.norm.layer(hidden, build.within("hidden_norm"))
        if not isinstance(mixer, AttentionSpec):
            raise ModelError("an EAGLE-3 head's layer must be attention")
        self.attention = _PairAttention(mixer, hidden, rotary, build.within("attention"))
        self.mlp_norm = model.norm.layer(hidden, build.within("mlp_norm"))
        self.mlp = layer.ffn.layer(hidden, build.within("mlp"))

    def forward(self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: Any) -> Residual:
        hidden = x.total()
        normed = self.hidden_norm(hidden)
        pair = torch.cat([self.attention_norm(self._embed(batch.input_ids)), normed], dim=1)
        mixed = self.attention.attend(self.attention.qkv(pair), batch, group, kv)
        residual = Residual(normed if self._norm_before_residual else hidden)
        added = self.attention.out.add(mixed, residual)
        return self.mlp(added, self.mlp_norm, batch)  # type: ignore[no-any-return]

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of intermediates, for the larger of both parts."""
        mlp: int = self.mlp.workspace_bytes(tokens)
        return max(self.attention.workspace_bytes(tokens), mlp)


class Eagle3Head(DraftHead):
    """An EAGLE-3 head.

    Attributes:
        ids: int64 [vocab], the target's id of each token in the head's vocabulary, or None if the
            ids are the same.
    """

    def __init__(self, spec: Eagle3Spec, target: Decoder, build: Build) -> None:
        super().__init__(spec.model, target, build)
        # Replaces the plain layer. The layout of KV stays the same.
        rotary = self.rotary[0] if len(self.rotary) else None
        build_layer = build.within("layers.0")
        block = _PairBlock(spec, rotary, build_layer, self.embed)  # type: ignore[arg-type]
        self.layers = nn.ModuleList([block])
        self.taps = spec.taps
        self._norm_output = spec.norm_output
        wide, every_rank = spec.target_hidden * len(spec.taps), whole(build)
        self.input_norm = None
        if spec.norm_before_fc:
            norm = NormSpec(kind="rms", eps=spec.model.norm.eps)
            self.input_norm = norm.layer(wide, build.within("input_norm"))
        where = every_rank.within("fc")
        self.fc = Linear(wide, spec.model.hidden_size, where, bias=False, split="outputs")
        self.ids: Tensor | None = None

    def combine(self, tapped: Tensor) -> Tensor:
        combined: Tensor = self.fc(tapped, norm=self.input_norm)
        return combined

    def forward(
        self, batch: ForwardBatch, kv: Sequence[Any], *, hidden: Tensor, shallow: bool = False
    ) -> Tensor:
        """See `DraftHead.forward`."""
        given = self.run(hidden, batch, kv, shallow)
        normed: Tensor = self.norm(given)
        return normed if self._norm_output else given

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [N, vocab of the target], -inf outside of the head's vocabulary."""
        found = super().logits(hidden if self._norm_output else self.norm(hidden))
        if self.ids is None:
            return found
        every = found.new_full((len(found), self.target.spec.vocab_size), -torch.inf)
        return every.index_copy_(1, self.ids, found)


def load_eagle3(
    folder: Path,
    target: Decoder,
    build: Callable[[Quantization], Build],
    *,
    load_format: str,
    seed: int,
) -> Eagle3Head:
    """Returns the head in a folder, with its weights. See `load_mtp`.

    Raises:
        ModelError: the folder holds no EAGLE-3 head, or its head does not fit the target. The error
            names a key or a tensor.
    """
    spec = eagle3_spec(load_config(folder), target.spec)
    made = build(Unquantized())
    head = Eagle3Head(spec, target, made)
    there = _names(folder) if load_format != "dummy" else {"lm_head.weight"}
    if "embed_tokens.weight" in there:
        head.own_embedding(made)
    elif spec.model.hidden_size != target.spec.hidden_size:
        raise ModelError(
            f"missing tensor embed_tokens.weight: the head is {spec.model.hidden_size} wide and "
            f"cannot use the model's embeddings, which are {target.spec.hidden_size} wide"
        )
    if spec.vocab < target.spec.vocab_size or "lm_head.weight" in there:
        head.own_head(spec.vocab, made)
    if load_format != "dummy":
        head.ids = _ids(folder, spec, "d2t" in there, target)
    elif spec.vocab < target.spec.vocab_size:
        head.ids = torch.arange(spec.vocab, device=target.device)
    load_weights(head, folder, load_format, seed, family=_FAMILY)
    share_equal(head)
    return head


def _source(spec: ModelSpec, name: str) -> Source:
    part, _, rest = name.partition(".")
    if part in _OUTER:
        return Source(f"{_OUTER[part]}.{rest}")
    stem, _, tensor = rest.partition(".")[2].rpartition(".")
    if stem == "hidden_norm":
        return Source(f"midlayer.hidden_norm.{tensor}")
    found = llama.source(spec, name)
    return replace(found, name=f"midlayer.{found.name.removeprefix('model.layers.0.')}")


def _names(folder: Path) -> set[str]:
    """Returns the canonical names of a head's tensors."""
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(folder)]
        return {_FAMILY.canonical(name) for file in files for name in file.keys()}  # noqa: SIM118


_FAMILY = Family(
    name="EAGLE-3",
    spec=llama.FAMILY.spec,
    source=_source,
    prefixes=_PREFIXES,
    # d2t is not a weight, and `_ids` reads it. t2d is not needed.
    ignored=re.compile(r"^(d2t|t2d|embed_tokens\.weight)$"),
    head="",
)


def _ids(folder: Path, spec: Eagle3Spec, has_d2t: bool, target: Decoder) -> Tensor | None:
    """Returns the target's ids of the head's tokens, int64 [vocab], or None if they are the same.

    The tensor `d2t` holds the differences between the target's and the head's ids.
    """
    if not has_d2t:
        if spec.vocab < target.spec.vocab_size:
            raise ModelError(
                f"missing tensor d2t: the head has {spec.vocab} of the model's "
                f"{target.spec.vocab_size} tokens"
            )
        return None
    with contextlib.ExitStack() as stack:
        files = [open_file(stack, file) for file in weight_files(folder)]
        stored = next(file.get_tensor("d2t") for file in files if "d2t" in set(file.keys()))
    if stored.shape != (spec.vocab,) or stored.is_floating_point():
        raise ModelError(
            f"tensor d2t has shape {tuple(stored.shape)} and dtype {stored.dtype}, expected "
            f"{spec.vocab} integers"
        )
    ids: Tensor = torch.arange(spec.vocab) + stored.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.spec.vocab_size:
        raise ModelError("tensor d2t names tokens that the model does not have")
    if len(set(ids.tolist())) < len(ids):
        raise ModelError("tensor d2t names a token twice")
    return ids.to(target.device)
