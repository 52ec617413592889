"""Drafts of draft heads in whole engines, compared with a plain twin after every step, for texts
that continue with some of the drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.arrays import int32
from quire.errors import ConfigError, ModelError
from quire.models.families import deepseek_v3, glm4_moe, qwen3_5, qwen3_next
from tests.features.speculation.test_speculation import free_of_charge
from tests.models import checkpoints

Twin = Callable[[list[int], int], list[int]]
"""Gives the drafts behind a text."""


def with_mtp(base: Path, case: str, block: str, names: dict[str, str]) -> tuple[Path, Twin]:
    """Makes a checkpoint whose last layer is stored as the draft layer.

    block: prefix of the layer's tensor names. names: names of its other parts, by kind.
    """
    model = checkpoints.make(base / "whole", case)
    inner, config = model.model, json.loads((base / "whole" / "config.json").read_text())
    last, width = len(inner.layers) - 1, config["hidden_size"]
    config["num_hidden_layers"] = last
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:last]
    config["num_nextn_predict_layers"] = config["mtp_num_hidden_layers"] = 1
    tensors = load_file(base / "whole" / "model.safetensors")
    old = f"model.layers.{last}."
    stored = {
        block + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }
    parts = {
        name: torch.randn(width) * 0.2 + (0.0 if "qwen" in case else 1.0)
        for name in ("embedding_norm", "hidden_norm", "norm")
    }
    parts["fc"] = torch.randn(width, 2 * width) * width**-0.5
    stored |= {f"{names[part]}.weight": tensor for part, tensor in parts.items()}
    for part, source in (("embedding", "embed_tokens"), ("head", "lm_head")):
        if part in names:
            found = next(name for name in tensors if source in name)
            stored[f"{names[part]}.weight"] = tensors[found].clone()
    folder = base / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    target = type(model).from_pretrained(folder).eval()

    def norm(part: str, x: Tensor) -> Tensor:
        factor = parts[part] + (1.0 if "qwen" in case else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * factor

    def run(tokens: list[int], hidden: Tensor) -> Tensor:
        embedded = norm("embedding_norm", inner.embed_tokens(torch.tensor(tokens)))
        joined = torch.cat([embedded, norm("hidden_norm", hidden)], dim=-1) @ parts["fc"].T
        count = len(tokens)
        places = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turns = inner.rotary_emb(joined[None], places)
        given = inner.layers[last](joined[None], attention_mask=mask, position_embeddings=turns)
        return norm("norm", (given[0] if isinstance(given, tuple) else given)[0])

    def states(tokens: list[int]) -> Tensor:
        found: Tensor = target.model(torch.tensor([tokens])).last_hidden_state[0]
        return found

    return folder, chained(states, lambda given: int(model.lm_head(given).argmax()), run)


def chained(
    states: Callable[[list[int]], Tensor],
    head: Callable[[Tensor], int],
    run: Callable[[list[int], Tensor], Tensor],
) -> Twin:
    """Returns a twin that drafts with a layer over pairs of a token and a hidden state.

    Args:
        states: returns the target's hidden states of tokens.
        head: returns the token for the layer's last output.
        run: computes the layer for tokens and hidden states.
    """

    @torch.inference_mode()
    def twin(text: list[int], count: int) -> list[int]:
        hidden = states(text[:-1])
        behind, drafts = text[1:], []
        for _ in range(count):
            given = run(behind, hidden)
            drafts.append(head(given[-1]))
            behind, hidden = [*behind, drafts[-1]], torch.cat([hidden, given[-1:]])
        return drafts

    return twin


NEXTN = {
    "fc": "eh_proj",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "norm": "shared_head.norm",
    "embedding": "embed_tokens",
    "head": "shared_head.head",
}
QWEN = {
    "fc": "fc",
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}
HYBRID = {
    **checkpoints.HYBRID,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
MTP = {
    "deepseek-v3": deepseek_v3,
    "glm4-moe": glm4_moe,
    "qwen3.5-mtp": qwen3_5,
    "qwen3-next-mtp": qwen3_next,
}
"""Families by case."""
CASES = {
    "qwen3.5-mtp": ("Qwen3_5", HYBRID),
    "qwen3-next-mtp": ("Qwen3Next", {**HYBRID, **checkpoints.SHARED}),
}


@pytest.fixture(scope="module", params=MTP)
def mtp(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Twin]]:
    case, module = request.param, MTP[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if case in CASES:
            patch.setitem(checkpoints.CASES, case, CASES[case])
            block, names = "mtp.layers.0.", {part: f"mtp.{name}" for part, name in QWEN.items()}
        else:
            # The family expects the number of layers of the published models.
            block = "model.layers.2."
            patch.setattr(module, "FAMILY", replace(module.FAMILY, ignored=re.compile(block)))
            names = {part: block + name for part, name in NEXTN.items()}
        yield with_mtp(tmp_path_factory.mktemp(case), case, block, names)


PROMPTS = [[7, 8, 9, 10, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]


def claims_of(llm: LLM, prompts: list[list[int]], length: int) -> list[tuple[int, list[int]]]:
    """Runs requests, and returns their drafts: pairs of a text's beginning and the drafts after
    it."""
    core = llm._core
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    requests = [
        core.add(str(i), int32(prompt), params, max_total=len(prompt) + length)[0]
        for i, prompt in enumerate(prompts)
    ]
    state = core._executor.state
    seen: list[tuple[Any, int, list[int]]] = []
    while core.has_work():
        core.step()
        for request in requests:
            if request.lane >= 0 and request.num_output_tokens:
                start = int(state.columns["draft_start"][request.lane])
                ids = state.columns["draft_ids"][request.lane].tolist()
                seen.append((request, start, [token for token in ids if token >= 0]))
    return [
        (request.tokens.view()[:start].tolist(), drafts)
        for request, start, drafts in seen
        if start <= request.known
    ]


def test_mtp_layers_draft_the_expected_tokens(mtp: tuple[Path, Twin]) -> None:
    """Acceptances are made up, so that texts continue with drafts whose pairs are recomputed."""
    folder, twin = mtp
    llm = LLM(
        str(folder), skip_tokenizer_init=True, num_kv_blocks=60, max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=8,
        speculative={"method": "mtp", "num_speculative_tokens": 3, "simulate_acceptance": 0.6},
    )  # fmt: skip
    free_of_charge(llm)
    found = claims_of(llm, PROMPTS, 24)
    for text, drafts in found:
        assert drafts == twin(text, len(drafts))
    assert len(found) > 12
    assert max(len(drafts) for _, drafts in found) == 3
    stats = llm.stats().speculation
    assert stats is not None
    assert stats.sources["mtp"].accepted > 5
    # The output head is a copy of the target's.
    assert llm._core._executor.loaded.models[1].head is None
    llm.shutdown()


def stale_updates(llm: LLM) -> int:
    stats = llm.stats().weight_updates
    assert stats is not None
    return stats.stale_draft_updates


def test_mtp_layers_follow_updates(mtp: tuple[Path, Twin], tmp_path: Path) -> None:
    """After an update the layer drafts as that of a new engine with the same weights."""
    folder, settings = mtp[0], {
        "skip_tokenizer_init": True, "num_kv_blocks": 60, "max_model_len": 128, "max_num_seqs": 4,
        "speculative": {"method": "mtp", "num_speculative_tokens": 3},
    }  # fmt: skip
    own = load_file(folder / "model.safetensors")
    other = {name: each.roll(3, 0).contiguous() for name, each in own.items()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(other, tmp_path / "model.safetensors")
    found = []
    for path in (folder, tmp_path):
        llm = LLM(str(path), **settings)
        free_of_charge(llm)
        found.append(claims_of(llm, PROMPTS, 12))
        if path == folder:
            last = next(name for name in own if re.fullmatch(r"model\.(\w+\.)?norm\.weight", name))
            llm.update_weights([(last, other[last])])
            assert stale_updates(llm) == 1
            llm.update_weights(other.items())
            assert stale_updates(llm) == 0
            free_of_charge(llm)
            found.append(claims_of(llm, PROMPTS, 12))
        llm.shutdown()
    assert found[1] == found[2] != found[0]


EAGLE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
KNOWN = 90
"""Tokens that the head knows."""


def random_head(norms_before_fc: bool, stem: str) -> dict[str, Tensor]:
    """Returns the tensors of a head; `stem` is the prefix of the layer's names."""
    torch.manual_seed(7)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * 1.2 * columns**-0.5

    def norm(width: int) -> Tensor:
        return 1.0 + 0.2 * torch.randn(width)

    known = torch.randperm(211)[:KNOWN].sort().values
    return {
        "fc.weight": matrix(48, 3 * 48),
        "norm.weight": norm(48),
        "lm_head.weight": matrix(KNOWN, 48),
        "d2t": known - torch.arange(KNOWN),
        "t2d": torch.zeros(211, dtype=torch.bool).index_fill_(0, known, True),
        f"{stem}hidden_norm.weight": norm(48),
        f"{stem}input_layernorm.weight": norm(48),
        f"{stem}post_attention_layernorm.weight": norm(48),
        f"{stem}self_attn.q_proj.weight": matrix(64, 96),
        f"{stem}self_attn.k_proj.weight": matrix(32, 96),
        f"{stem}self_attn.v_proj.weight": matrix(32, 96),
        f"{stem}self_attn.o_proj.weight": matrix(48, 64),
        f"{stem}mlp.gate_proj.weight": matrix(80, 48),
        f"{stem}mlp.up_proj.weight": matrix(80, 48),
        f"{stem}mlp.down_proj.weight": matrix(48, 80),
        **({"input_norm.weight": norm(3 * 48)} if norms_before_fc else {}),
    }


def eagle_twin(
    target: Any, tensors: dict[str, Tensor], stem: str, layers: list[int], changed: bool
) -> Twin:
    """Returns a reference of an EAGLE-3 head.

    Args:
        target: the target model.
        tensors: the head's tensors.
        stem: prefix of the layer's tensor names.
        layers: the layers after which hidden states are read.
        changed: whether norms are placed as in later heads: before fc, before the residual, and
            on the output.
    """

    def norm(name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * scale * tensors[f"{name}.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(8) / 8.0)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x[..., :8], x[..., 8:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def states(tokens: list[int]) -> Tensor:
        found = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        side_by_side = torch.cat([found[layer][0] for layer in layers], dim=-1)
        return linear("fc", norm("input_norm", side_by_side) if changed else side_by_side)

    def run(tokens: list[int], hidden: Tensor) -> Tensor:
        embedded = target.model.embed_tokens(torch.tensor(tokens))
        normed = norm(f"{stem}hidden_norm", hidden)
        pair = torch.cat([norm(f"{stem}input_layernorm", embedded), normed], dim=-1)
        q = turned(linear(f"{stem}self_attn.q_proj", pair).view(-1, 4, 16))
        k, v = (linear(f"{stem}self_attn.{n}_proj", pair).view(-1, 2, 16) for n in "kv")
        k, v = (x.repeat_interleave(2, dim=1) for x in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4.0
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = (normed if changed else hidden) + linear(f"{stem}self_attn.o_proj", mixed)
        y = norm(f"{stem}post_attention_layernorm", x)
        gate = torch.nn.functional.silu(linear(f"{stem}mlp.gate_proj", y))
        x = x + linear(f"{stem}mlp.down_proj", gate * linear(f"{stem}mlp.up_proj", y))
        return norm("norm", x) if changed else x

    def head(given: Tensor) -> int:
        logits = linear("lm_head", given if changed else norm("norm", given))
        best = int(logits.argmax())
        return best + int(tensors["d2t"][best])

    return chained(states, head, run)


def eagle_folder(base: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    save_file(tensors, base / "model.safetensors")
    return base


ORIGINAL = {
    **EAGLE,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": KNOWN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 2]},
}
LATER = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": EAGLE,
    "draft_vocab_size": KNOWN,
    "eagle_aux_hidden_state_layer_ids": [1, 0, 1],
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target") / "model"
    return folder, checkpoints.make(folder, "qwen3")


def eagle_llm(target: Path, head: Path, **more: Any) -> LLM:
    return LLM(
        str(target), skip_tokenizer_init=True, num_kv_blocks=60, max_model_len=128, max_num_seqs=4,
        speculative={"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, **more},
    )  # fmt: skip


@pytest.mark.parametrize("later", [False, True])
def test_eagle3_heads_draft_the_expected_tokens(
    target: tuple[Path, Any], tmp_path: Path, later: bool
) -> None:
    stem = "layers.0." if later else "midlayer."
    tensors = random_head(later, stem)
    folder = eagle_folder(tmp_path / "head", tensors, LATER if later else ORIGINAL)
    llm = eagle_llm(target[0], folder, simulate_acceptance=0.5)
    free_of_charge(llm)
    found = claims_of(llm, PROMPTS, 20)
    llm.shutdown()
    twin = eagle_twin(target[1], tensors, stem, [2, 1, 2], later)
    assert len(found) > 12
    for text, drafts in found:
        assert drafts == twin(text, len(drafts))
    assert max(len(drafts) for _, drafts in found) == 3


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"midlayer.hidden_norm.weight": None}, {}, "midlayer.hidden_norm.weight"),
        ({"d2t": None}, {}, "missing tensor d2t"),
        ({"d2t": torch.full((KNOWN,), 200)}, {}, "d2t names tokens"),
        ({"d2t": torch.zeros(KNOWN + 1, dtype=torch.int64)}, {}, "d2t has shape"),
        ({"fc.weight": torch.zeros(48, 96)}, {}, r"fc.weight has shape \(48, 96\)"),
        ({"midlayer.more": torch.zeros(1)}, {}, "unexpected tensor midlayer.more"),
        ({}, {"vocab_size": 200}, "200 tokens, but the model has 211"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, "EAGLE-3 head"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "layer_ids"),
        ({}, {"eagle_config": {"fc_norm": True}}, "fc_norm"),
        ({}, {"num_hidden_layers": 2}, "several layers"),
    ],
    ids=str,
)
def test_heads_that_cannot_be_used(
    target: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], config: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    changed = {**random_head(False, "midlayer."), **change}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = eagle_folder(tmp_path / "head", tensors, {**ORIGINAL, **config})
    with pytest.raises((ConfigError, ModelError), match=message):
        eagle_llm(target[0], folder)


def test_models_without_the_layer(target: tuple[Path, Any], mtp: tuple[Path, Twin]) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        LLM(str(target[0]), speculative={"method": "mtp"}, skip_tokenizer_init=True)
    tensors = load_file(mtp[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith((".eh_proj.weight", "mtp.fc.weight")))
    del tensors[name]
    folder = mtp[0].parent / "without"
    folder.mkdir()
    (folder / "config.json").write_text((mtp[0] / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"missing tensor {re.escape(name)}"):
        LLM(str(folder), speculative={"method": "mtp"}, skip_tokenizer_init=True)
