"""Drafts of draft heads, in whole engines, against a plain twin: what the layers draft after every
step, from texts that go on with some of their drafts."""

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
from quire.models.families import glm4_moe
from tests.models import checkpoints
from tests.unit.test_speculation import free_of_charge

Twin = Callable[[list[int], int], list[int]]
"""Gives the drafts behind a text."""


def with_mtp(base: Path, case: str, block: str, names: dict[str, str]) -> tuple[Path, Twin]:
    """Makes a checkpoint whose last layer is stored as the one that drafts.

    block: the beginning of its names. names: of its other parts, by what they are.
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

    return folder, chained(target.model, model.lm_head, run)


def chained(target: Any, head: Any, run: Callable[[list[int], Tensor], Tensor]) -> Twin:
    """Returns drafts of a layer over pairs. run: computes the layer for pairs of tokens and hidden
    states, with all before them."""

    @torch.inference_mode()
    def twin(text: list[int], count: int) -> list[int]:
        hidden = target(torch.tensor([text[:-1]])).last_hidden_state[0]
        behind, drafts = text[1:], []
        for _ in range(count):
            given = run(behind, hidden)
            drafts.append(int(head(given[-1]).argmax()))
            behind, hidden = [*behind, drafts[-1]], torch.cat([hidden, given[-1:]])
        return drafts

    return twin


GLM = {
    "fc": "model.layers.2.eh_proj",
    "embedding_norm": "model.layers.2.enorm",
    "hidden_norm": "model.layers.2.hnorm",
    "norm": "model.layers.2.shared_head.norm",
    "embedding": "model.layers.2.embed_tokens",
    "head": "model.layers.2.shared_head.head",
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Twin]]:
    # The published models are deeper, and the family knows by how much.
    ignored = re.compile(r"^model\.layers\.2\.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm4_moe, "FAMILY", replace(glm4_moe.FAMILY, ignored=ignored))
        yield with_mtp(tmp_path_factory.mktemp("glm"), "glm4-moe", "model.layers.2.", GLM)


PROMPTS = [[7, 8, 9, 10, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]


def claims_of(llm: LLM, prompts: list[list[int]], length: int) -> list[tuple[int, list[int]]]:
    """Runs requests, and returns what was claimed of their texts: pairs of a text's beginning and
    the drafts behind it."""
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


@pytest.mark.parametrize(("acceptance", "budget"), [(None, 2048), (0.6, 8)])
def test_mtp_layers_draft_what_they_should(
    glm: tuple[Path, Twin], acceptance: float | None, budget: int
) -> None:
    """With acceptances made up, texts go on with drafts, whose pairs must be computed anew."""
    folder, twin = glm
    settings: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
    if acceptance is not None:
        settings["simulate_acceptance"] = acceptance
    llm = LLM(
        str(folder), skip_tokenizer_init=True, num_kv_blocks=60, max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=budget, speculative=settings,
    )  # fmt: skip
    free_of_charge(llm)
    found = claims_of(llm, PROMPTS, 24)
    assert len(found) > 12
    longest = 0
    for text, drafts in found:
        assert drafts == twin(text, len(drafts))
        longest = max(longest, len(drafts))
    assert longest == 3
    if acceptance is not None:
        stats = llm.stats().speculation
        assert stats is not None
        assert stats.sources["mtp"].accepted > 5
    # The head is the target's over again.
    assert llm._core._executor._models[1].head is None
    llm.shutdown()
