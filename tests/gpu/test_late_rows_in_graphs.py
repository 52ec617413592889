"""Masks that come late, on a GPU: the rows sit out, and the bits are those of rows that wait."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from quire import LLM
from quire.features.structured_output.masks import MaskBuilder
from quire.runner.hooks.mask import Mask
from tests.gpu.test_grammars import params

FOREVER = {"structured_outputs_wait_us": 1e6}
DRAFT = {"speculative": {"method": "draft", "num_speculative_tokens": 3}}
EAGLE3 = {"speculative": {"method": "eagle3", "num_speculative_tokens": 3}}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def run(**settings: Any) -> tuple[list[tuple[Any, ...]], int]:
    """Returns tokens and ends, and the number of late rows."""
    # Masks are made slow in this process.
    given = {
        "structured_outputs_processes": 0,
        "num_kv_blocks": 400,
        "deterministic": True,
        **settings,
    }
    llm = LLM(device="cuda", max_num_seqs=24, max_model_len=512, **given)
    prompts = [f"Here is record {i} of a person:" for i in range(40)]
    outputs = llm.generate(prompts, [params(i) for i in range(40)], use_tqdm=False)
    late = llm.stats().late_rows
    llm.shutdown()
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs], late


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes some masks take longer than a step."""
    build, draw = MaskBuilder.build, random.Random(0)

    def slow(self: MaskBuilder, rows: Any, masks: Any, vocab: int) -> None:
        if draw.random() < 0.03:
            time.sleep(draw.choice([1e-3, 3e-3, 8e-3]))
        build(self, rows, masks, vocab)

    monkeypatch.setattr(MaskBuilder, "build", slow)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_in_flight": 3},
        {"num_kv_blocks": 80},
        {"structured_outputs_wait_us": 0.0},
        DRAFT,
        EAGLE3,
        pytest.param({"tensor_parallel_size": 2}, marks=TWO),
        pytest.param({"pipeline_parallel_size": 2}, marks=TWO),
    ],
    ids=str,
)
def test_the_bits_of_rows_that_wait(slow_masks: None, settings: dict[str, Any]) -> None:
    expected, late = run(**{**settings, **FOREVER})
    assert late == 0
    found, late = run(**settings)
    assert found == expected
    assert late > 20


@pytest.mark.parametrize(
    "settings",
    [{}, {"steps_in_flight": 3}, {"num_kv_blocks": 80}, DRAFT,
     pytest.param({"tensor_parallel_size": 2}, marks=TWO)],
    ids=str,
)  # fmt: skip
def test_processes_that_build_masks_change_no_bits(settings: dict[str, Any]) -> None:
    expected, _ = run(**{**settings, **FOREVER})
    for count in (1, 3):
        assert run(**settings, structured_outputs_processes=count)[0] == expected


def test_plain_rows_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While masks take long, a row without masks takes every step."""
    build = MaskBuilder.build

    def slow(self: MaskBuilder, rows: Any, masks: Any, vocab: int) -> None:
        time.sleep(0.05)
        build(self, rows, masks, vocab)

    monkeypatch.setattr(MaskBuilder, "build", slow)
    sizes = {"max_num_seqs": 8, "max_model_len": 512, "num_kv_blocks": 400}
    llm = LLM(device="cuda", structured_outputs_processes=0, **sizes)
    plain, gated = params(2), params(1)
    prompts = ["Once upon a time", "A person:"]
    alone = llm.generate(prompts[0], plain, use_tqdm=False)[0]
    before = llm.stats()
    outputs = llm.generate(prompts, [plain, gated], use_tqdm=False)
    after = llm.stats()
    llm.shutdown()
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert after.late_rows > before.late_rows
    # Where a row waits for the other row's masks, both share nearly every step.
    longer = max(len(output.outputs[0].token_ids) for output in outputs)
    assert after.steps - before.steps > longer + 20


@pytest.mark.parametrize("settings", [{}, {"steps_in_flight": 3}, {"num_kv_blocks": 80}], ids=str)
def test_forced_text_changes_no_bits(settings: dict[str, Any]) -> None:
    expected, _ = run(**settings)
    settings = {**settings, "structured_outputs_drafts": 7}
    assert run(**settings)[0] == expected
    # Nothing measured: forced text is drafted whenever there is some.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mask, "seconds", lambda hook, program, graphs: {})
        assert run(**settings)[0] == expected
