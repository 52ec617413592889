"""The loader accepts exactly the tensors that fit, from any file, and names the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    resolve_model_path,
    spec_from_config,
)
from tests.models.checkpoints import make

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]


def empty(folder: Path, dtype: torch.dtype | None = torch.float32) -> Decoder:
    return build_model(spec_from_config(load_config(folder)), device="cpu", dtype=dtype)


def load(folder: Path) -> Decoder:
    model = empty(folder)
    load_weights(model, folder)
    return model


def edit(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def same(a: Decoder, b: Decoder) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_sharded_checkpoint_is_the_same(case: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make(whole, case)
    make(parts, case, max_shard_size="60KB")
    assert (parts / "model.safetensors.index.json").exists()
    assert len(list(parts.glob("*.safetensors"))) > 2
    done: list[tuple[int, int]] = []
    model = empty(parts)
    load_weights(model, parts, progress=lambda a, b: done.append((a, b)))
    assert same(load(whole), model)
    assert done[-1][0] == done[-1][1] > 0
    assert done == sorted(done)


def test_sharded_index_naming_absent_files(tmp_path: Path) -> None:
    make(tmp_path, "llama", max_shard_size="60KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    with pytest.raises(ModelError, match=r"\.\./x"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "x\\u0000"}}'],
)
def test_an_invalid_index_is_refused(text: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"is not a valid index|names files that do not exist"):
        load(tmp_path)


def _rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def _drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


Q = "model.layers.1.self_attn.q_proj.weight"
ERRORS: dict[str, tuple[str, Change, str]] = {
    "missing": ("llama", lambda t: _drop(t, Q), f"missing tensor {Q}"),
    "unexpected": (
        "llama",
        lambda t: t.update(extra=torch.zeros(1)),
        "unexpected tensor extra",
    ),
    "misshapen": (
        "llama",
        lambda t: _cut(t, Q),
        rf"{Q} has shape \(47, 48\), expected \(48, 48\)",
    ),
    "renamed": ("llama", lambda t: _rename(t, Q, "typo"), f"missing tensor {Q}.*unexpected.*typo"),
    "integer": (
        "llama",
        lambda t: t.update({Q: t[Q].to(torch.int8)}),
        f"{Q} has dtype I8",
    ),
    "bias where the config has none": (
        "llama",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
        "unexpected tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "gpt2 in the layout of a linear": (
        "gpt2",
        lambda t: t.update(
            {
                "transformer.h.0.attn.c_attn.weight": t["transformer.h.0.attn.c_attn.weight"]
                .t()
                .contiguous()
            }
        ),
        r"c_attn.weight has shape \(144, 48\), expected \(48, 144\)",
    ),
    "untied head of a tied model": (
        "llama-mqa-tied",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "tied to the embeddings, but lm_head.weight",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_tensors_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    case, change, message = ERRORS[name]
    make(tmp_path, case)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_tolerated_extras(tmp_path: Path) -> None:
    make(tmp_path, "llama-mqa-tied")
    before = load(tmp_path)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    edit(tmp_path, add)
    assert same(before, load(tmp_path))


def test_gpt2_with_the_names_of_its_first_release(tmp_path: Path) -> None:
    make(tmp_path, "gpt2")
    before = load(tmp_path)

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            _rename(tensors, name, name.removeprefix("transformer."))
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit(tmp_path, rename)
    assert same(before, load(tmp_path))


def test_missing_or_broken_files_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    model = empty(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_weights(model, tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        load_weights(model, tmp_path)


def test_dummy_weights(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    first, again, other, half = (
        empty(tmp_path, dtype) for dtype in (torch.float32,) * 3 + (torch.bfloat16,)
    )
    for model, seed in ((first, 5), (again, 5), (other, 6), (half, 5)):
        load_weights(model, tmp_path, load_format="dummy", seed=seed)
    assert same(first, again)
    assert not same(first, other)
    for x, y in zip(first.parameters(), half.parameters(), strict=True):
        assert torch.equal(x.to(torch.bfloat16), y)
    weight = first.layers[0].mlp.up.weight.values
    assert abs(weight.std().item() - 0.02) < 0.001
    assert abs(weight.mean().item()) < 0.001
    assert torch.equal(first.norm.weight, torch.ones(48))
    values = torch.cat([p.flatten() for p in first.parameters() if p.dim() > 1])
    assert values.unique().numel() > 0.99 * values.numel()


def test_resolving_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = resolve_model_path(None)
    assert load_config(embedded)["model_type"] == "qwen3"
    assert resolve_model_path(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="no such model folder"):
        resolve_model_path(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_path(str(tmp_path / "file"))

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not be fetched from the hub"):
        resolve_model_path("nobody/nothing-at-all")


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="JSON object"):
        load_config(tmp_path)
