"""Logits of rows with adapters are PEFT's; rows without keep their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.features.lora.adapter_pool import AdapterPool
from quire.models import (
    build_model,
    load_config,
    load_weights,
    model_quantization,
    resolve_model_path,
    spec_from_config,
)
from quire.ops.rows import StepRows
from quire.parallel import ProcessGroup, SingleGroup
from tests.features.lora.peft_adapters import logits, make_adapter, needs_peft
from tests.gloo_ranks import on_ranks
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.slow import slow

pytestmark = needs_peft

TEXTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23], [11, 12, 13], [9, 8, 7, 6, 5], [11, 12, 13], [4]]
SLOTS = [0, -1, 1, 2, 1]
"""One for each text."""
ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8},
    {"r": 16, "lora_alpha": 4, "use_rslora": True},
    {"r": 3, "lora_alpha": 3},
]
CASES = [
    "llama-biases", "llama-mqa-tied", "mistral-window", "qwen3", "gpt2", "phi3", "gemma2",
    "cohere2", "qwen3-next", "qwen3.5",
]  # fmt: skip
"""Biases, one KV head, windows, norms of heads, outputs that share a tensor, of other activations
and orders of norms, blocks in parallel, gates, and gated delta nets."""
OTHER_FAMILIES = [
    "mistral", "qwen2", "exaone4", "gemma3", "gemma4", "glm", "glm4", "granite", "ministral",
    "ministral3", "olmo2", "olmo3", "seed-oss", "smollm3",
]  # fmt: skip
"""With those above, all without experts."""


class AdaptedHarness:
    """A decoder with adapters in its slots, and steps in which row i uses slot `slots[i]`."""

    def __init__(
        self, folder: Path, adapters: Sequence[Path], *, group: ProcessGroup | None = None,
        quantization: str | None = None, rank: int = 16,
    ) -> None:  # fmt: skip
        config = load_config(folder)
        spec = spec_from_config(config)
        model = build_model(
            spec, device="cpu", dtype=torch.float32, group=group or SingleGroup(),
            quantization=model_quantization(folder, config, spec, quantization),
        )  # fmt: skip
        load_weights(model, folder)
        self.harness = Harness(model)
        self.pool = AdapterPool(
            model, slots=max(1, len(adapters)), rank=rank, cache_bytes=1 << 30,
            flags=np.zeros(1, dtype=np.int64),
        )  # fmt: skip
        for slot, path in enumerate(adapters):
            self.fill(slot, path)
        self.pool.close()

    def fill(self, slot: int, path: Path) -> None:
        image = self.pool.cache.get(self.pool.read_now(str(path)))
        assert image is not None
        self.pool.put(image, slot)

    def logits(self, texts: Sequence[list[int]], slots: Sequence[int]) -> list[torch.Tensor]:
        rows = [self.harness.add(text) for text in texts]
        starts = np.cumsum([0, *(len(text) for text in texts)])
        lanes = torch.arange(len(texts), dtype=torch.int32)
        start = torch.tensor(starts, dtype=torch.int32)
        if any(slot >= 0 for slot in slots):
            column = torch.tensor(slots, dtype=torch.int32)
            step = StepRows(lanes, start, start, torch.zeros_like(lanes))
            self.pool.begin(step, column, int(starts[-1]))
        found = self.harness.step([(row, len(row.tokens)) for row in rows])
        self.pool.end()
        return found


def adapters_of(model: Any, folder: Path) -> list[Path]:
    paths = [folder / f"adapter-{seed}" for seed in range(len(ADAPTERS))]
    for seed, (path, config) in enumerate(zip(paths, ADAPTERS, strict=True)):
        make_adapter(model, path, seed, **config)
    return paths


@pytest.mark.parametrize("case", [*CASES, *map(slow, OTHER_FAMILIES)])
def test_mixed_ranks_in_one_batch(tmp_path: Path, case: str) -> None:
    model = make(tmp_path / "model", case)
    paths = adapters_of(model, tmp_path)
    adapted = AdaptedHarness(tmp_path / "model", paths)
    base = adapted.logits(TEXTS, [-1] * len(TEXTS))
    found = adapted.logits(TEXTS, SLOTS)
    for text, slot, got, plain in zip(TEXTS, SLOTS, found, base, strict=True):
        expected = logits(model, None if slot < 0 else paths[slot], text)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if slot < 0:
            assert torch.equal(got, plain)
        else:
            assert (got - plain).abs().max() > 0.1


def test_patterns_and_subsets_of_linears(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "qwen3")
    configs: list[dict[str, Any]] = [
        {"r": 1, "target_modules": ["v_proj"]},
        {
            "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj", "down_proj"],
            "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 2},
            "alpha_pattern": {"down_proj": 40},
        },
        {"r": 2, "target_modules": ["gate_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"r": 64, "target_modules": ["k_proj", "o_proj"]},
    ]  # fmt: skip
    paths = [tmp_path / str(index) for index in range(len(configs))]
    for seed, (path, config) in enumerate(zip(paths, configs, strict=True)):
        make_adapter(model, path, seed, **config)
    adapted = AdaptedHarness(tmp_path / "model", paths, rank=64)
    text = TEXTS[0]
    found = adapted.logits([text] * 4, range(4))
    for path, got in zip(paths, found, strict=True):
        torch.testing.assert_close(got, logits(model, path, text), atol=1e-4, rtol=1e-4)


def test_the_adapter_that_ships() -> None:
    import transformers

    folder, dragon = resolve_model_path(None), Path("examples/dragon-lora").resolve()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapted = AdaptedHarness(folder, [dragon])
    base, found = adapted.logits([TEXTS[0]] * 2, [-1, 0])
    expected = logits(model, dragon, TEXTS[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - base).abs().max() > 0.1
    assert sum(file.stat().st_size for file in dragon.iterdir()) <= 300_000


def test_a_reused_slot_keeps_nothing_of_the_last_adapter(tmp_path: Path) -> None:
    """A second adapter with fewer linears and a lower rank replaces all values of the first."""
    model = make(tmp_path / "model", "llama")
    make_adapter(model, tmp_path / "a", 0, r=16)
    make_adapter(model, tmp_path / "b", 1, r=2, target_modules=["k_proj"])
    adapted = AdaptedHarness(tmp_path / "model", [tmp_path / "a"])
    adapted.fill(0, tmp_path / "b")
    (got,) = adapted.logits([TEXTS[0]], [0])
    expected = logits(model, tmp_path / "b", TEXTS[0])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_on_a_quantized_base(tmp_path: Path, quantization: str) -> None:
    """The adapter adds to the quantized layer what it adds to any: the difference is B A x."""
    model = make(tmp_path / "model", "llama-head-dim")
    make_adapter(model, tmp_path / "a", 0, r=4, target_modules=["v_proj"], layers_to_transform=[2])
    adapted = AdaptedHarness(tmp_path / "model", [tmp_path / "a"], quantization=quantization)
    base = adapted.logits(TEXTS, [-1] * len(TEXTS))
    slots = [0, -1, -1, -1, 0]
    found = adapted.logits(TEXTS, slots)
    for slot, got, plain in zip(slots, found, base, strict=True):
        assert torch.equal(got, plain) == (slot < 0)


def ranked_logits(
    folders: list[tuple[Path, list[Path]]], group: ProcessGroup
) -> list[list[list[list[float]]]]:
    return [
        [found.tolist() for found in AdaptedHarness(f, paths, group=group).logits(TEXTS, SLOTS)]
        for f, paths in folders
    ]


def test_two_ranks(tmp_path: Path) -> None:
    """Fewer KV heads than ranks, biases, and stacked projections."""
    folders = []
    models = []
    for case in ("llama-mqa-tied", "qwen3-tied-bias", "gpt2"):
        model = make(tmp_path / case / "model", case)
        models.append(model)
        folders.append((tmp_path / case / "model", adapters_of(model, tmp_path / case)))
    found = on_ranks(ranked_logits, folders, tmp_path)
    assert found[0] == found[1]
    for (_, paths), model, texts in zip(folders, models, found[0], strict=True):
        for text, slot, got in zip(TEXTS, SLOTS, texts, strict=True):
            expected = logits(model, None if slot < 0 else paths[slot], text)
            torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)
