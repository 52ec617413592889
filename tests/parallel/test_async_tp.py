"""`--async-tp`: engines that run long steps as two halves, unsupported engines, and the default."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError
from quire.layers.async_tp import HalvesGroup
from quire.runner.graphs import Buckets, Graphs
from quire.runner.program import BodyShape
from quire.runner.state import Limits
from tests.engine.test_ranks import bits, completions
from tests.models.checkpoints import CASES
from tests.slow import slow
from tests.tiny_engine import TINY, model_folder


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"num_kv_blocks": 18}),
        slow(4, {"kv_cache_dtype": "int8"}),
        slow(2, {"pipeline_parallel_size": 2, "num_kv_blocks": 18}),
    ],
    ids=["2-few-blocks", "4-kv-int8", "2-by-2-stages"],
)
def test_halves_give_the_tokens_of_one_rank(ranks: int, settings: dict[str, Any]) -> None:
    """Chunked prompts, generating requests, prefix hits, preemption and a grammar in the same
    steps."""
    found = completions(ranks, async_tp="on", **settings)
    settings.pop("pipeline_parallel_size", None)
    assert found == completions(1, **settings)


def test_halves_have_the_bits_of_one_rank() -> None:
    assert bits(2, async_tp="on", max_num_batched_tokens=48) == bits(1)


@pytest.mark.slow
def test_a_choice_on_a_cpu() -> None:
    """Halves would not be faster."""
    assert completions(2, async_tp="auto") == completions(1)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, **settings))
    return str(error.value)


@pytest.mark.parametrize("value", ["yes", "ON", 1, None])
def test_invalid_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^async_tp must be "):
        EngineArgs.from_kwargs(async_tp=value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "async_tp=on needs tensor_parallel_size of at least 2"),
        ({"pipeline_parallel_size": 2}, "async_tp=on needs tensor_parallel_size of at least 2"),
        ({"tensor_parallel_size": 2, "lora_dir": "/x"}, "async_tp=on is not supported with LoRA"),
        (
            {"tensor_parallel_size": 2, "speculative": {"method": "suffix"}},
            "async_tp=on is not supported with speculation",
        ),
    ],
    ids=["one-rank", "stages", "lora", "drafts"],
)
def test_settings_that_rule_out_async_tp(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    folder = model_folder(tmp_path, TINY)
    assert refusal(folder, async_tp="on", **settings).startswith(reason)


_SHARED = {
    **TINY, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_NORMED = {**TINY, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
_RECURRENT = {
    **TINY, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    **CASES["qwen3.5"][1], "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_SHARED, "Glm4MoeForCausalLM: layer 1 has a shared expert"),
        (_NORMED, "Olmo2ForCausalLM: layer 0 is not a plain layer"),
        (_RECURRENT, "Qwen3_5ForCausalLM: layer 0 is recurrent"),
    ],
    ids=["shared", "norms", "recurrent"],
)
def test_models_that_rule_out_async_tp(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    folder = model_folder(tmp_path, config)
    said = refusal(folder, async_tp="on", tensor_parallel_size=2)
    assert said.startswith(f"async_tp=on is not supported for {reason}")
    # The automatic choice leaves it off.
    settings: dict[str, Any] = {"async_tp": "auto", "tensor_parallel_size": 2, "device": "cpu"}
    resolve(EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings))


def halves_group(least: int = sys.maxsize, **options: Any) -> HalvesGroup:
    inner = SimpleNamespace(handle=None)
    return HalvesGroup(cast(Any, inner), least, torch.device("cpu"), **options)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda handle: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda handle=None: 2)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({8192: 0.9, 4096: 0.95, 2048: 0.98, 1024: 1.1, 512: 0.5}, 2048),
        ({8192: 0.9, 4096: 0.9, 2048: 0.9, 1024: 0.9, 512: 0.9}, 512),
        ({8192: 0.995}, sys.maxsize),
        ({8192: 1.2}, sys.maxsize),
    ],
)
def test_tokens_from_which_halves_are_faster(gains: dict[int, float], expected: int) -> None:
    """Sizes are tried from the largest downwards, as long as halves are faster."""
    group, asked = halves_group(), []

    def seconds(tokens: int) -> float:
        asked.append(tokens)
        return tokens * 1e-5 * (gains[tokens] if tokens >= group.halves_from else 1.0)

    group.choose(seconds, 8192)
    assert group.halves_from == expected
    assert set(asked) <= set(gains)


class _Program:
    """A program that records how its bodies were run."""

    def __init__(self, group: HalvesGroup) -> None:
        self.model = SimpleNamespace(group=group, device=torch.device("cpu"))
        self.ran: list[tuple[int, bool]] = []

    def body(self, shape: BodyShape, *, shallow: bool) -> None:
        self.ran.append((shape.tokens, shape.tokens >= self.model.group.halves_from))


class _Graphs(Graphs):
    """Runs programs instead of capturing them. Halves are faster from 1000 tokens on."""

    def __init__(self, device: torch.device, limits: Limits) -> None:
        self._device, self._limits, self._buckets = device, limits, Buckets(limits)
        self._graphs = {}

    def capture(self, works: Mapping[Any, Callable[[bool], None]], progress: Any = None) -> None:
        for key, work in works.items():
            work(False)
            self._graphs[key] = cast(Any, None)

    def seconds(self, key: tuple[BodyShape, int]) -> float:
        shape, place = key
        cut = place % 2 == 0
        return shape.tokens + (0.0 if not cut else -100.0 if shape.tokens > 1000 else 100.0)


@pytest.mark.usefixtures("two_ranks")
def test_the_choice_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are run both ways; afterwards the group has the measured threshold."""
    monkeypatch.setattr("quire.runner.graphs.Graphs", _Graphs)
    monkeypatch.setattr("quire.runner.graphs.sum_over_all_ranks", lambda x: 2 * x)
    monkeypatch.setitem(
        sys.modules,
        "quire.runner.expert_tiles",
        cast(Any, SimpleNamespace(choose_tiles=lambda model, tokens: None)),
    )
    limits = Limits(lanes=8, tokens=2048, logit_rows=8, length=2048)
    graphs = _Graphs(torch.device("cpu"), limits)
    group = halves_group()
    program = _Program(group)
    graphs._tune(cast(Any, program))
    assert group.halves_from == 1024
    assert program.ran == [(size, cut) for size in (2048, 1024, 512) for cut in (True, False)]
    fixed = halves_group(7, measured=False)
    graphs._tune(cast(Any, _Program(fixed)))
    assert fixed.halves_from == 7
