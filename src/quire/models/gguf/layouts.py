"""Tables that map settings and tensors of GGUF architectures to config.json and parameters.

The tables follow llama.cpp's converters, which reorder or change some tensors. A `RowPart` undoes a
reordering of rows, and a `Computed` undoes other changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.gguf.rope import rope_scaling
from quire.models.gguf.settings import Settings

Config = Mapping[str, Any]
Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Indices of a file's rows, in the order of the parameter's rows."""
Setting = Callable[[Settings], Any]
Order = Callable[[Config, int], Rows]
"""Returns a parameter's rows, given config.json and the number of rows of the file's tensor."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """A parameter that consists of some rows of a file's tensor.

    Attributes:
        name: the parameter's name in its layer; {} stands for the expert.
        order: returns the indices of its rows in the tensor.
    """

    name: str
    order: Order


@dataclass(frozen=True, slots=True)
class Computed:
    """A parameter that is computed from one or several tensors.

    Attributes:
        sources: the tensors' names in their layer.
        compute: returns the parameter in float32, given config.json and the tensors.
    """

    sources: tuple[str, ...]
    compute: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """An architecture of GGUF.

    Attributes:
        kind: the architecture's name in files.
        architecture: the class in config.json whose family builds the model.
        config: keys of config.json for this architecture, in addition to the common ones.
        names: parameters by the names of their tensors, where they differ from `NAMES`.
        computed: computed parameters, by name.
        shapes: first axes of parameters, because files leave out axes of length 1.
        norm_offset: added to the weights of norms.
        raw_norms: norms to which `norm_offset` is not added.
        partial: whether only a part of each head may be rotated.
        model_type: value of `model_type` in config.json, or None to leave it out.
        when: returns whether this layout fits a file. Used if an architecture has several layouts.
    """

    kind: str
    architecture: str
    config: Mapping[str, Setting] = field(default_factory=dict)
    names: Mapping[str, str | tuple[RowPart, ...]] = field(default_factory=dict)
    computed: Mapping[str, Computed] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    raw_norms: tuple[str, ...] = ()
    partial: bool = False
    model_type: str | None = None
    when: Callable[[Settings], bool] = lambda settings: True


OUTER = {
    "token_embd": "embedding",
    "position_embd": "positions",
    "output_norm": "norm",
    "output": "head",
}
"""Parameters outside of layers, by their names in files."""
NAMES: dict[str, str | tuple[RowPart, ...]] = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.qkv.q",
    "attn_k": "attention.qkv.k",
    "attn_v": "attention.qkv.v",
    "attn_output": "attention.out",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.up.gate",
    "ffn_up": "mlp.up.up",
    "ffn_down": "mlp.down",
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_exps": "mlp.up.{}.gate",
    "ffn_up_exps": "mlp.up.{}.up",
    "ffn_down_exps": "mlp.down.{}",
    "ffn_gate_shexp": "mlp.shared.up.gate",
    "ffn_up_shexp": "mlp.shared.up.up",
    "ffn_down_shexp": "mlp.shared.down",
    "ffn_gate_inp_shexp": "mlp.shared.gate",
}
"""Parameters of a layer, by their tensors' names in most files."""
IGNORED = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd", "nextn")
"""Tensors that are not loaded: those for rotary positions and those of MTP layers."""


def _integer(name: str, default: int | None = None) -> Setting:
    return lambda settings: settings.integer(name, default)


def _number(name: str, default: float | None = None) -> Setting:
    return lambda settings: settings.number(name, default)


def _optional(name: str) -> Setting:
    """Returns a number's `Setting`, which gives None if the file does not have the number."""
    return lambda settings: None if settings.get(name) is None else settings.number(name)


def _flag(name: str, default: bool) -> Setting:
    return lambda settings: settings.flag(name, default)


def _has(tensor: str) -> Setting:
    return lambda settings: any(name.endswith(f".{tensor}") for name in settings.tensors)


def _always(value: Any) -> Setting:
    return lambda settings: value


def _window(settings: Settings) -> int | None:
    """Returns the window of the layers with a window, or None. In files 0 means no window."""
    name = "attention.sliding_window"
    return None if not settings.get(name) else settings.integer(name)


def _layer_types(settings: Settings) -> list[str] | None:
    """Returns each layer's kind if the file lists them, else None."""
    listed = settings.get("attention.sliding_window_pattern")
    if not isinstance(listed, list):
        return None
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool(windowed)] for windowed in listed[: layers(settings)]]


def _dense_layers(settings: Settings) -> list[int]:
    """Returns the indices of layers without experts."""
    return [i for i in range(layers(settings)) if not settings.has("ffn_gate_inp.weight", i)]


def layers(settings: Settings) -> int:
    """Returns the number of layers, without MTP layers."""
    drafting = settings.get("nextn_predict_layers") or 0
    return settings.integer("block_count") - (drafting if type(drafting) is int else 0)


_WINDOWS: dict[str, Setting] = {"sliding_window": _window, "layer_types": _layer_types}
_EXPERTS: dict[str, Setting] = {
    "num_experts": _integer("expert_count"),
    "num_experts_per_tok": _integer("expert_used_count"),
    "moe_intermediate_size": _integer("expert_feed_forward_length"),
}
_GROUPED_EXPERTS: dict[str, Setting] = {
    **_EXPERTS,
    "n_shared_experts": lambda settings: settings.get("expert_shared_count") or 0,
    "first_k_dense_replace": lambda settings: settings.get("leading_dense_block_count") or 0,
    "routed_scaling_factor": lambda settings: settings.get("expert_weights_scale") or 1.0,
    "norm_topk_prob": _flag("expert_weights_norm", False),
}


def _deinterleaved(heads: str) -> Order:
    """Returns the order of rows of q or k. In files the two halves of each head are interleaved.

    Args:
        heads: key of config.json with the number of heads.
    """

    def order(config: Config, rows: int) -> Rows:
        count = config[heads]
        return _checked(rows, 2 * count).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def _checked(rows: int, unit: int) -> Rows:
    """Returns the indices of all rows. Raises ModelError if `unit` does not divide their number."""
    if rows % unit:
        raise ModelError(f"a tensor has {rows} rows, which {unit} does not divide")
    return np.arange(rows)


_DEINTERLEAVED: dict[str, str | tuple[RowPart, ...]] = {
    "attn_q": (RowPart("attention.qkv.q", _deinterleaved("num_attention_heads")),),
    "attn_k": (RowPart("attention.qkv.k", _deinterleaved("num_key_value_heads")),),
}


def _half(which: int) -> Order:
    """Returns the order of the first or second half of a tensor's rows."""
    return lambda config, rows: _checked(rows, 2).reshape(2, -1)[which]


_GATE_UP = RowPart("mlp.up.gate", _half(0)), RowPart("mlp.up.up", _half(1))


def _stacked(which: int) -> Order:
    """Returns the order of q, k or v in a tensor with all three."""

    def order(config: Config, rows: int) -> Rows:
        kv = config["num_key_value_heads"] * config["head_dim"]
        sizes = config["num_attention_heads"] * config["head_dim"], kv, kv
        return _split(rows, sizes)[which]

    return order


def _split(rows: int, sizes: tuple[int, ...]) -> list[Rows]:
    """Returns the rows of consecutive parts. Raises ModelError unless all sizes sum to `rows`."""
    if rows != sum(sizes):
        raise ModelError(f"a tensor has {rows} rows, expected {sum(sizes)}")
    return np.split(np.arange(rows), np.cumsum(sizes)[:-1])


_QKV = tuple(RowPart(f"attention.qkv.{name}", _stacked(i)) for i, name in enumerate("qkv"))
_BEHIND: dict[str, str | tuple[RowPart, ...]] = {
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "mlp_out_norm",
}
"""Norms on the outputs of a layer's parts."""
_BETWEEN: dict[str, str | tuple[RowPart, ...]] = {"post_attention_norm": "mlp_norm"}
"""The norm before the feed-forward part. Some files name it after the preceding attention."""


def _gemma_scale(largest: int) -> Setting:
    """Returns the setting of `query_pre_attn_scalar`, which files do not have.

    The value is the head size, except in the largest model. Like llama.cpp, this function
    recognizes that model by its number of layers, `largest`.
    """

    def scale(settings: Settings) -> int:
        hidden = settings.integer("embedding_length")
        heads = settings.integer("attention.head_count")
        if settings.integer("block_count") == largest:
            return hidden // heads
        return settings.integer("attention.key_length", hidden // heads)

    return scale


def _latent(name: str) -> Callable[[Settings], int]:
    """Returns a function for the size of a head's keys or values.

    In newer files of llama.cpp, which support latents, the name ends with `_mla`.
    """
    return lambda settings: settings.integer(
        f"attention.{name}_mla" if settings.get(f"attention.{name}_mla") else f"attention.{name}"
    )


def _groups(name: str, known: int) -> Setting:
    """Returns the setting for groups of experts, which early files of DeepSeek-V3 do not have."""
    return lambda settings: settings.integer(
        name, known if settings.integer("expert_count") == 256 else 1
    )


_LATENT: dict[str, Setting] = {
    **{name: value for name, value in _GROUPED_EXPERTS.items() if name != "num_experts"},
    "n_routed_experts": _integer("expert_count"),
    "kv_lora_rank": _integer("attention.kv_lora_rank"),
    "q_lora_rank": lambda settings: settings.get("attention.q_lora_rank") or None,
    "qk_rope_head_dim": _integer("rope.dimension_count"),
    "qk_nope_head_dim": lambda settings: (
        _latent("key_length")(settings) - settings.integer("rope.dimension_count")
    ),
    "v_head_dim": _latent("value_length"),
}
_LATENT_NAMES: dict[str, str | tuple[RowPart, ...]] = {
    "attn_q": "attention.inputs.q",
    "attn_q_a": "attention.inputs.q_a",
    "attn_q_a_norm": "attention.q_norm",
    "attn_q_b": "attention.q_b",
    "attn_kv_a_mqa": "attention.inputs.kv_a",
    "attn_kv_a_norm": "attention.kv_norm",
    "attn_kv_b": "attention.kv_b",
}


def _keys_and_values(config: Config, keys: Tensor, values: Tensor) -> Tensor:
    """Returns the projection from latents. In files its part for keys is transposed."""
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


_LATENT_COMPUTED = {
    "attention.kv_b.weight": Computed(("attn_k_b.weight", "attn_v_b.weight"), _keys_and_values)
}


def _delta(name: str, default: int | None = None) -> Setting:
    return _integer(f"ssm.{name}", default)


_DELTA: dict[str, Setting] = {
    "full_attention_interval": _integer("full_attention_interval", 4),
    "linear_conv_kernel_dim": _delta("conv_kernel"),
    "linear_key_head_dim": _delta("state_size"),
    "linear_num_key_heads": _delta("group_count"),
    "linear_num_value_heads": _delta("time_step_rank"),
    "linear_value_head_dim": lambda settings: (
        settings.integer("ssm.inner_size") // settings.integer("ssm.time_step_rank")
    ),
}
_SHARED_EXPERT: dict[str, Setting] = {
    **_EXPERTS,
    "shared_expert_intermediate_size": _integer("expert_shared_feed_forward_length"),
    "mlp_only_layers": _dense_layers,
}


@dataclass(frozen=True, slots=True)
class _DeltaOrder:
    """Orders of rows in the tensors of gated delta nets.

    Attributes:
        tiled: whether value head i belongs to key head i % key_heads in files. Otherwise the value
            heads of a key head are neighbours.
    """

    tiled: bool

    def values(self, config: Config, size: int) -> Rows:
        """Returns the order of value heads that have `size` rows each."""
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        places = np.arange(heads * size)
        if self.tiled:
            places = places.reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)
        return places

    def stacked(self, which: int) -> Order:
        """Returns the order of q, k or v in a tensor with all three."""

        def order(config: Config, rows: int) -> Rows:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            own = self.values(config, config["linear_value_head_dim"])
            found = _split(rows, (keys, keys, len(own)))[which]
            return found[own] if which == 2 else found

        return order

    def all_values(self, config: Config, rows: int) -> Rows:
        """Returns the order of a tensor with `linear_value_head_dim` rows for each value head."""
        found = self.values(config, config["linear_value_head_dim"])
        return _split(rows, (len(found),))[0][found]

    def each_head(self, config: Config, rows: int) -> Rows:
        """Returns the order of a tensor with one row for each value head."""
        found = self.values(config, 1)
        return _split(rows, (len(found),))[0][found]

    def names(self) -> dict[str, str | tuple[RowPart, ...]]:
        """Returns `Layout.names` of architectures with gated delta nets."""
        return {
            **_BETWEEN,
            "attn_q": (
                RowPart("attention.qkv.q", _gated(0)),
                RowPart("attention.qkv.gate", _gated(1)),
            ),
            "attn_qkv": tuple(
                RowPart(f"attention.inputs.{name}", self.stacked(i)) for i, name in enumerate("qkv")
            ),
            "attn_gate": (RowPart("attention.inputs.z", self.all_values),),
            "ssm_conv1d": tuple(
                RowPart(f"attention.conv.{name}", self.stacked(i)) for i, name in enumerate("qkv")
            ),
            "ssm_beta": (RowPart("attention.inputs.b", self.each_head),),
            "ssm_alpha": (RowPart("attention.inputs.a", self.each_head),),
            "ssm_dt.bias": (RowPart("attention.dt_bias", self.each_head),),
            "ssm_norm": "attention.norm",
            "ssm_out": "attention.out",
            "ssm_ba": tuple(
                RowPart(f"attention.inputs.{name}", _pair(i)) for i, name in enumerate("ba")
            ),
            "ssm_in": tuple(
                RowPart(f"attention.inputs.{name}", _head_part(i)) for i, name in enumerate("qkvz")
            ),
        }

    def computed(self) -> dict[str, Computed]:
        """Returns `Layout.computed` of architectures with gated delta nets."""

        def decay(config: Config, stored: Tensor) -> Tensor:
            return torch.log(-stored)[torch.from_numpy(self.values(config, 1))]

        def out(config: Config, stored: Tensor) -> Tensor:
            order = self.values(config, config["linear_value_head_dim"])
            return stored[:, torch.from_numpy(order)]

        found = {"attention.A_log": Computed(("ssm_a",), decay)}
        if self.tiled:
            found["attention.out.weight"] = Computed(("ssm_out.weight",), out)
        return found


def _gated(which: int) -> Order:
    """Returns the order of q (0) or the gate (1) in a tensor with each head's q, then its gate."""

    def order(config: Config, rows: int) -> Rows:
        count = config["num_attention_heads"]
        return _checked(rows, 2 * count).reshape(count, 2, -1)[:, which].reshape(-1)

    return order


def _pair(which: int) -> Order:
    """Returns the order of b (0) or a (1) in a tensor with each key head's b, then its a."""

    def order(config: Config, rows: int) -> Rows:
        count = config["linear_num_key_heads"]
        return _checked(rows, 2 * count).reshape(count, 2, -1)[:, which].reshape(-1)

    return order


def _head_part(which: int) -> Order:
    """Returns the order of q, k, v or z (0 to 3) in a tensor with each key head's four parts."""

    def order(config: Config, rows: int) -> Rows:
        key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values_per_key = config["linear_num_value_heads"] // key_heads
        value_dim = values_per_key * config["linear_value_head_dim"]
        by_head = _checked(rows, key_heads).reshape(key_heads, -1)
        parts = _split(by_head.shape[1], (key_dim, key_dim, value_dim, value_dim))
        return by_head[:, parts[which]].reshape(-1)

    return order


_GROUPED, _TILED = _DeltaOrder(tiled=False), _DeltaOrder(tiled=True)
_DELTA_LAYOUT: dict[str, Any] = {
    "shapes": {
        **{f"attention.conv.{name}.weight": (-1, 1) for name in "qkv"},
        "mlp.shared.gate.weight": (1,),
    },
    "norm_offset": -1.0,
    "raw_norms": ("attention.norm",),
    "partial": True,
}
_LLAMA_BIASES: dict[str, Setting] = {
    "attention_bias": _has("attn_q.bias"),
    "mlp_bias": _has("ffn_gate.bias"),
}
_GEMMA: dict[str, Any] = {"names": _BEHIND, "norm_offset": -1.0}


def _is_sigmoid(settings: Settings) -> bool:
    return settings.get("expert_gating_func") == 2 or _has("exp_probs_b.bias")(settings) is True


def _scaling(settings: Settings, multiplier: float) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of models with YaRN's `mscale`.

    Args:
        settings: settings of the file.
        multiplier: the file stores `mscale` times this.
    """
    found = rope_scaling(settings)
    sharpness = settings.get("rope.scaling.yarn_log_multiplier")
    if found is not None and sharpness:
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(sharpness / multiplier, 6))
    return found


def _ministral_scaling(settings: Settings) -> dict[str, Any] | None:
    found = _scaling(settings, 1.0)
    if found is not None and settings.get("attention.temperature_scale"):
        found["llama_4_scaling_beta"] = settings.number("attention.temperature_scale")
    return found


LAYOUTS = (
    Layout(
        "llama",
        "MixtralForCausalLM",
        {
            "num_local_experts": _integer("expert_count"),
            "num_experts_per_tok": _integer("expert_used_count"),
        },
        _DEINTERLEAVED,
        when=lambda settings: bool(settings.get("expert_count")),
    ),
    Layout("llama", "LlamaForCausalLM", _LLAMA_BIASES, _DEINTERLEAVED),
    Layout(
        "mistral3",
        "Ministral3ForCausalLM",
        {"rope_scaling": _ministral_scaling, "sliding_window": _window},
        _DEINTERLEAVED,
        model_type="ministral3",
    ),
    Layout("smollm3", "SmolLM3ForCausalLM", _LLAMA_BIASES, _DEINTERLEAVED),
    Layout(
        "granite",
        "GraniteForCausalLM",
        {
            **_LLAMA_BIASES,
            "embedding_multiplier": _number("embedding_scale", 1.0),
            "residual_multiplier": _number("residual_scale", 1.0),
            "attention_multiplier": _number("attention.scale", 1.0),
            "logits_scaling": _number("logit_scale", 1.0),
        },
        _DEINTERLEAVED,
    ),
    Layout("qwen2", "Qwen2ForCausalLM"),
    Layout("qwen3", "Qwen3ForCausalLM", {"attention_bias": _has("attn_q.bias")}),
    Layout(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "norm_topk_prob": _always(True), "mlp_only_layers": _dense_layers},
    ),
    Layout(
        "qwen3next",
        "Qwen3NextForCausalLM",
        {**_DELTA, **_SHARED_EXPERT, "norm_topk_prob": _always(True)},
        _GROUPED.names(),
        _GROUPED.computed(),
        **_DELTA_LAYOUT,
    ),
    Layout(
        "qwen35",
        "Qwen3_5ForCausalLM",
        _DELTA,
        _TILED.names(),
        _TILED.computed(),
        **_DELTA_LAYOUT,
    ),
    Layout(
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        {**_DELTA, **_SHARED_EXPERT},
        {
            **_TILED.names(),
            "ffn_gate_up_exps": (
                RowPart("mlp.up.{}.gate", _half(0)),
                RowPart("mlp.up.{}.up", _half(1)),
            ),
        },
        _TILED.computed(),
        **_DELTA_LAYOUT,
    ),
    Layout(
        "phi3",
        "Phi3ForCausalLM",
        {"sliding_window": _window},
        {"attn_qkv": _QKV, "ffn_up": _GATE_UP},
        partial=True,
    ),
    Layout(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **_WINDOWS,
            "attn_logit_softcapping": _number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _gemma_scale(46),
        },
        **_GEMMA,
    ),
    Layout(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            **_WINDOWS,
            "rope_local_base_freq": _number("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": _optional("final_logit_softcapping"),
            "query_pre_attn_scalar": _gemma_scale(62),
        },
        **_GEMMA,
    ),
    Layout(
        "cohere2",
        "Cohere2ForCausalLM",
        {
            **_WINDOWS,
            "layer_norm_eps": _number("attention.layer_norm_epsilon"),
            "logit_scale": _number("logit_scale"),
            "attention_bias": _has("attn_q.bias"),
        },
    ),
    Layout(
        "olmo2",
        "Olmo3ForCausalLM",
        _WINDOWS,
        {
            **_BEHIND,
            "attn_q_norm": "attention.q_projection_norm",
            "attn_k_norm": "attention.k_projection_norm",
        },
        when=lambda settings: _window(settings) is not None,
    ),
    Layout(
        "olmo2",
        "Olmo2ForCausalLM",
        {},
        {
            **_BEHIND,
            "attn_q_norm": "attention.q_projection_norm",
            "attn_k_norm": "attention.k_projection_norm",
        },
    ),
    Layout("exaone4", "Exaone4ForCausalLM", _WINDOWS, _BEHIND),
    Layout(
        "glm4",
        "Glm4ForCausalLM",
        {"attention_bias": _has("attn_q.bias")},
        {**_BEHIND, "ffn_up": _GATE_UP},
        partial=True,
    ),
    Layout(
        "chatglm",
        "GlmForCausalLM",
        {"attention_bias": lambda s: s.has("attn_q.bias") or s.has("attn_qkv.bias")},
        {"attn_qkv": _QKV, "ffn_up": _GATE_UP},
        partial=True,
    ),
    Layout(
        "glm4moe",
        "Glm4MoeForCausalLM",
        {
            **_GROUPED_EXPERTS,
            "n_group": _integer("expert_group_count", 1),
            "topk_group": _integer("expert_group_used_count", 1),
            "attention_bias": _has("attn_q.bias"),
            "use_qk_norm": _has("attn_q_norm.weight"),
        },
        _BETWEEN,
        partial=True,
    ),
    Layout(
        "gpt-oss",
        "GptOssForCausalLM",
        {
            **{name: value for name, value in _EXPERTS.items() if name == "num_experts_per_tok"},
            "num_local_experts": _integer("expert_count"),
            "intermediate_size": _integer("expert_feed_forward_length"),
            "sliding_window": _integer("attention.sliding_window"),
            "layer_types": _layer_types,
            "attention_bias": _has("attn_q.bias"),
            "rope_scaling": lambda s: {**(rope_scaling(s) or {}), "truncate": False},
            "experts_layout": _always("each"),
        },
        {**_BETWEEN, "attn_sinks": "attention.sinks"},
    ),
    Layout(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": _integer("expert_count"),
            "num_experts_per_tok": _integer("expert_used_count"),
            "intermediate_size": _integer("expert_feed_forward_length"),
            "rotary_dim": _integer("rope.dimension_count"),
        },
        {
            "attn_q_norm": "attention.q_projection_norm",
            "attn_k_norm": "attention.k_projection_norm",
        },
        partial=True,
    ),
    Layout(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "n_group": _groups("expert_group_count", 8),
            "topk_group": _groups("expert_group_used_count", 4),
            "rope_scaling": lambda settings: _scaling(settings, 0.1),
        },
        _LATENT_NAMES,
        _LATENT_COMPUTED,
        when=_is_sigmoid,
    ),
    Layout(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        {**_LATENT, "rope_scaling": lambda settings: _scaling(settings, 0.1)},
        _LATENT_NAMES,
        _LATENT_COMPUTED,
    ),
    Layout(
        "seed_oss",
        "SeedOssForCausalLM",
        {
            "attention_bias": _has("attn_q.bias"),
            "attention_out_bias": _has("attn_output.bias"),
            "mlp_bias": _has("ffn_gate.bias"),
        },
        _BETWEEN,
    ),
    Layout(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "n_embd": _integer("embedding_length"),
            "n_layer": _integer("block_count"),
            "n_head": _integer("attention.head_count"),
            "n_positions": _integer("context_length"),
            "n_inner": _integer("feed_forward_length"),
            "layer_norm_epsilon": _number("attention.layer_norm_epsilon"),
        },
        {"attn_qkv": _QKV},
    ),
)


def layout_of(settings: Settings) -> Layout:
    """Returns the layout of a file.

    Raises:
        ModelError: the architecture is not supported.
    """
    found = next((own for own in LAYOUTS if own.kind == settings.kind and own.when(settings)), None)
    if found is None:
        known = ", ".join(sorted({own.kind for own in LAYOUTS}))
        raise ModelError(
            f"GGUF files of the architecture {settings.kind} are not supported; known: {known}"
        )
    return found
