"""Adapters with options that Quire does not implement are refused, and the option is named."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError, RequestError
from quire.features.lora import patterns, peft
from quire.features.lora.patterns import ModulePatterns
from quire.features.lora.peft import WEIGHTS, read_adapter
from quire.features.lora.projections import AdapterLayout
from quire.features.lora.registry import CONFIG, folder_of, names_in, parse_setting, valid_name
from quire.models import build_model, load_config, spec_from_config
from tests.features.lora.peft_adapters import change, make_adapter, needs_peft, save, tensors
from tests.models.checkpoints import make

pytestmark = needs_peft

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    model = make(folder / "model", "llama")
    make_adapter(model, folder / "adapter", 0, r=4)
    return folder


@pytest.fixture(scope="module")
def layout(checkpoint: Path) -> AdapterLayout:
    spec = spec_from_config(load_config(checkpoint / "model"))
    return AdapterLayout(build_model(spec, device="meta", dtype=torch.float32), 8)


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the base model's weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters is not supported"),
        ({"from_the_future": 1}, "from_the_future is not supported"),
        ({"r": 16}, "the rank 16 is more than max_lora_rank=8"),
        ({"r": 0}, "the rank 0 is not an integer from 1 to 256"),
        ({"r": "4"}, "the rank '4' is not an integer"),
        ({"r": 5}, r"lora_A.weight has shape \(4, 80\), expected \(5, 80\)"),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj.lora_A.weight has shape"),
        ({"rank_pattern": {"(": 3}}, "the pattern '[(]' is malformed"),
        ({"rank_pattern": {"a)|(b": 3}}, "is malformed"),
        ({"rank_pattern": {"(?=a)": 3}}, "lookaround, which are not supported"),
        ({"alpha_pattern": {r"(a)\1": 3}}, "alpha_pattern: .* backreference"),
        ({"alpha_pattern": {r"\w{5000}": 3}}, "alpha_pattern: .* too large"),
        ({"rank_pattern": {f"m{i}": 4 for i in range(20_000)}}, "20000 patterns, more than 4096"),
        ({"rank_pattern": [1]}, "rank_pattern is not a table"),
        ({"lora_alpha": "x"}, "lora_alpha 'x' is not a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf is not a number"),
        ({"lora_alpha": 1e300}, r"lora_alpha 1e\+300 is not a number of float32"),
        ({"lora_alpha": 10**400}, "is not a number of float32"),
    ],
)
def test_configs(
    adapter: Path, layout: AdapterLayout, config: dict[str, Any], message: str
) -> None:
    change(adapter, **config)
    with pytest.raises(RequestError, match=message) as refused:
        read_adapter(adapter, layout)
    assert refused.value.param == "lora_path"


Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {key: value for key, value in found.items() if key != name}


def added(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda found: {**found, name: tensor}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without(f"{FIRST}.lora_A.weight"), r"layers.0.self_attn.q_proj.lora_A.weight is missing"),
        (without(f"{FIRST}.lora_B.weight"), r"layers.0.self_attn.q_proj.lora_B.weight is missing"),
        (added(f"{FIRST}.lora_B.weight", torch.zeros(47, 4)), r"has shape \(47, 4\), expected"),
        (added(f"{FIRST}.lora_A.weight", torch.full((4, 48), torch.nan)), "infinite values or NaN"),
        (added(f"{FIRST}.lora_A.weight", torch.zeros(4, 48).int()), "has dtype int32"),
        (added(f"{FIRST}.lora_magnitude_vector", torch.zeros(48)), "DoRA is not supported"),
        (added(f"{FIRST}.lora_A.bias", torch.zeros(48)), "not a part of a plain LoRA adapter"),
        (
            added("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 211)),
            "adapters of embeddings and of the head",
        ),
        (
            added("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 48)),
            "adapters of embeddings and of the head",
        ),
        (lambda found: {}, "holds no tensor"),
    ],
)
def test_tensors(
    adapter: Path, layout: AdapterLayout, edit: Callable[[Tensors], Tensors], message: str
) -> None:
    save(adapter, edit(tensors(adapter)))
    with pytest.raises(RequestError, match=message):
        read_adapter(adapter, layout)


@pytest.mark.parametrize("part", ["A", "B"])
def test_values_that_the_models_dtype_does_not_hold(
    checkpoint: Path, adapter: Path, part: str
) -> None:
    """A finite value of fp32 that is infinite in fp16."""
    spec = spec_from_config(load_config(checkpoint / "model"))
    half = AdapterLayout(build_model(spec, device="meta", dtype=torch.float16), 8)
    found = tensors(adapter)
    name = f"{FIRST}.lora_{part}.weight"
    large = torch.zeros_like(found[name])
    large[0, 0] = 65520.0
    save(adapter, {**found, name: large})
    with pytest.raises(RequestError, match=f"lora_{part}.weight holds values beyond float16"):
        read_adapter(adapter, half)
    large[0, 0] = 65504.0
    save(adapter, {**found, name: large})
    read_adapter(adapter, half)


def test_unknown_modules(adapter: Path, layout: AdapterLayout) -> None:
    found = tensors(adapter)
    save(adapter, {name.replace("layers.0", "layers.9"): part for name, part in found.items()})
    with pytest.raises(RequestError, match=r"layers.9.\S+: the model has no linear layer"):
        read_adapter(adapter, layout)


def test_damaged_and_oversized_files(adapter: Path, layout: AdapterLayout) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    for damaged in (b"", whole[:-10], whole[:50], b"\xff" * 100, whole + b"\0"):
        (adapter / WEIGHTS).write_bytes(damaged)
        with pytest.raises(RequestError, match=r"adapter_model.safetensors cannot be read"):
            read_adapter(adapter, layout)
    with (adapter / WEIGHTS).open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(RequestError, match=r"adapter_model.safetensors has more than"):
        read_adapter(adapter, layout)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(RequestError, match=r"adapter_model.safetensors cannot be read"):
        read_adapter(adapter, layout)
    for damaged in (b"", b"[]", b"{", b"[" * 100_000):
        (adapter / CONFIG).write_bytes(damaged)
        with pytest.raises(RequestError, match=r"adapter_config.json"):
            read_adapter(adapter, layout)


def test_names(checkpoint: Path) -> None:
    assert valid_name("org/name-1.0")
    for name in ("", ".hidden", "/root", " x", "a\nb", "x" * 257):
        assert not valid_name(name)
    assert parse_setting("a=b=c") == ("a", "b=c")
    for setting in ("a", "=b", "a="):
        with pytest.raises(ConfigError, match="NAME=PATH"):
            parse_setting(setting)
    assert names_in(checkpoint) == ["adapter"]
    assert names_in(checkpoint / "none") == []
    for name in ("model", "..", "./adapter", "adapter/", "x/../adapter"):
        assert folder_of(checkpoint, name) is None


def test_patterns_are_pefts() -> None:
    from peft.utils.other import get_pattern_key

    keys = [
        "q_proj", "self_attn.q_proj", "attn.q_proj", "layers.0.self_attn.q_proj", "proj", "k.proj",
        "^model.layers.1.*q_proj", r"model\.layers\.[01]\.self_attn\.\w_proj", ".*", "(k|v)_proj",
        r"layers\.\d+\.mlp\.(?:up|gate)_proj", "q_proj$", "model", "",
    ]  # fmt: skip
    names = [
        f"model.layers.{layer}.{name}"
        for layer in (0, 1, 10)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.myq_proj")
    ]
    for order in (keys, keys[::-1], *([key] for key in keys)):
        found = ModulePatterns("rank_pattern", {key: key for key in order})
        for name in names:
            assert found.value(name, name) == get_pattern_key(order, name)


def test_patterns_that_backtrack_take_no_time(adapter: Path, layout: AdapterLayout) -> None:
    change(adapter, rank_pattern={"((.*)*)*z": 8}, alpha_pattern={"((.*)*)*z": 8})
    assert read_adapter(adapter, layout).parts


def test_patterns_may_take_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", -1.0)
    with pytest.raises(RequestError, match="alpha_pattern: its patterns take more than"):
        ModulePatterns("alpha_pattern", {"a": 1})


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_only_regular_files_are_read(adapter: Path, layout: AdapterLayout, name: str) -> None:
    (adapter / name).unlink()
    for make_one in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        make_one(adapter / name)
        with pytest.raises(RequestError, match=f"{name} cannot be read: "):
            read_adapter(adapter, layout)
        (adapter / name).rename(adapter / f"{name}.{make_one.__name__.strip('<>')}")


def test_a_file_that_does_not_come_is_given_up(
    adapter: Path, layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    come = threading.Event()
    monkeypatch.setattr(peft, "_READ_SECONDS", 0.05)
    monkeypatch.setattr(peft, "read_bounded", lambda path, most: come.wait(60))
    with pytest.raises(RequestError, match=r"was not read within 0.05 s"):
        read_adapter(adapter, layout)
    come.set()
