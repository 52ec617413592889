"""The script that trains an EAGLE-3 head: the engine takes the head, and texts stay the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire import LLM, SamplingParams
from tests.features.speculation.test_speculation import free_of_charge

TOOLS = Path(__file__).parents[2] / "tools"
TINY = Path(__file__).parents[2] / "src" / "quire" / "embedded" / "quire-tiny"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """Yields the script; it and the recipe's modules are importable only meanwhile."""
    before = dict(sys.modules)
    sys.path.insert(0, str(TOOLS))
    yield __import__("train_eagle3")
    for path in (str(TOOLS), str(TOOLS / "embedded_model")):
        sys.path.remove(path)
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TOOLS)):
            del sys.modules[name]


def test_the_engine_drafts_with_the_head(script: ModuleType, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "head"
    asked = [f"Tell me a story about a {animal}." for animal in ("cat", "dog", "bird")]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in asked]
    prompts.write_text("\n".join(lines))
    sizes = "--limit", "40", "--batch", "2", "--length", "64", "--draft-vocab", "200"
    script.main(
        [str(TINY), str(prompts), "--out", str(out), "--device", "cpu", "--seconds", "1", *sizes]
    )
    report = json.loads((out / "report.json").read_text())
    assert 0.0 < report["covered"] <= 1.0
    assert len(report["agreement"]) == 6
    texts = []
    for method in (None, {"method": "eagle3", "model": str(out)}):
        llm = LLM(device="cpu", max_model_len=128, num_kv_blocks=50, speculative=method)
        if method:
            free_of_charge(llm)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        texts.append(llm.generate(asked, params, use_tqdm=False)[0].outputs[0].token_ids)
        stats = llm.stats().speculation
        llm.shutdown()
    assert texts[0] == texts[1]
    assert stats is not None
    assert stats.sources["eagle3"].drafted > 0


def test_the_model_is_read_document_by_document(script: ModuleType) -> None:
    """A document's states do not depend on the one before it in the same row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    teacher = script.HubTeacher(model, (2, 5))
    tokens = torch.randint(10, 6000, (1, 20), generator=torch.Generator().manual_seed(0))
    document = (torch.arange(20) >= 8).long()[None]
    with torch.no_grad():
        both = teacher(tokens, document)
        alone = teacher(tokens[:, 8:], document[:, 8:])
    for whole, part in zip(both, alone, strict=True):
        torch.testing.assert_close(whole[:, 8:], part, atol=1e-4, rtol=1e-4)
