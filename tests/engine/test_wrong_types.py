"""Values of the wrong type or out of range raise typed errors that name the field."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.engine.loop.prompts import prompt_ids
from quire.errors import BrokenLogitsError, ConfigError, ModelError, RequestError
from quire.sampling_params import MIN_TEMPERATURE

WRONG: tuple[Any, ...] = (
    "x",
    b"x",
    object(),
    [[1]],
    {"a": 1},
    math.inf,
    math.nan,
    2**70,
    1.5,
    True,
)
SETTINGS = [field.name for field in dataclasses.fields(EngineArgs)]


def refusal(call: Callable[[], object]) -> str | None:
    """Returns the field for which a call was refused, or None if it was accepted."""
    try:
        call()
    except (ConfigError, RequestError) as error:
        return error.param
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_any_value_is_taken_or_refused_by_name(name: str) -> None:
    for value in (*WRONG, None, Path("x"), ()):
        blamed = refusal(lambda value=value: EngineArgs(**{name: value}))
        assert blamed in (None, name) or name == "disk_cache", value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_gb", math.inf),
        ("kv_cache_gb", "4"),
        ("max_num_seqs", "x"),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("seed", 2**70),
        ("seed", None),
        ("priority_weight", math.inf),
        ("enforce_eager", "no"),
        ("disable", ("graphs", 1)),
        ("model", 5),
        ("scheduling_policy", ["fcfs"]),
    ],
)
def test_settings_of_the_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be") as found:
        EngineArgs(**{name: value})
    assert found.value.param == name


def test_paths_and_lists_are_settings() -> None:
    args = EngineArgs(model=Path("/a/b"), disable=["graphs"])  # type: ignore[arg-type]
    assert (args.model, args.disable) == ("/a/b", ("graphs",))
    assert EngineArgs(gpu_memory_utilization=1).gpu_memory_utilization == 1


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_sampling_parameter_of_any_value_is_taken_or_refused_by_name(name: str) -> None:
    for value in (*WRONG, None, (1,), ["a"], -1):
        blamed = refusal(lambda value=value: SamplingParams(**{name: value}))
        assert blamed in (None, name, "stop", "min_tokens"), value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop_token_ids", "ab"),
        ("ignore_eos", "no"),
        ("detokenize", 0),
        ("logit_bias", [1]),
        ("logit_bias", {1: "x"}),
        ("structured_outputs", "json"),
        ("structured_outputs", {"jsn": "{}"}),
        ("structured_outputs", {}),
        ("seed", 2**70),
        ("max_tokens", 1.0),
        ("temperature", None),
    ],
)
def test_sampling_parameters_of_the_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as found:
        SamplingParams(**{name: value})
    assert found.value.param == name


@pytest.mark.parametrize("name", StructuredOutputsParams.__struct_fields__)
def test_structured_outputs_of_the_wrong_type(name: str) -> None:
    for value in (5, b"x", object(), [1], ("a", 1)):
        with pytest.raises(RequestError):
            StructuredOutputsParams(**{name: value})


def test_structured_outputs_are_taken_as_a_dict() -> None:
    asked = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    assert asked.structured_outputs == quire.StructuredOutputsParams(choice=("a", "b"))
    schema = SamplingParams(structured_outputs={"json": {"type": "null"}})  # type: ignore[arg-type]
    assert schema.structured_outputs == StructuredOutputsParams(json='{"type":"null"}')


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1e-38, 1e-45, 9e-6])
def test_tiny_temperatures_are_greedy(value: float) -> None:
    assert SamplingParams(temperature=value).greedy
    assert SamplingParams(temperature=value).temperature == 0.0
    assert not SamplingParams(temperature=MIN_TEMPERATURE).greedy


def test_pooling_parameters_of_the_wrong_type() -> None:
    for fields in ({"normalize": 1}, {"pooling": ["last"]}, {"dimensions": 1.0}):
        with pytest.raises(RequestError) as found:
            PoolingParams(**fields)
        assert found.value.param in fields


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", kv_cache_gb=0.05, max_model_len=256)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"text",
        [None],
        [1, None],
        [1.5],
        {"prompt": 5},
        {"prompt": None},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [[1, 2], [3]]},
        {"prompt_token_ids": [[1, 2], [3, 4]]},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [2**70]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": []},
        {"text": "a"},
        object(),
        np.zeros((2, 2)),
    ],
)
def test_prompts_of_the_wrong_type(llm: LLM, prompt: Any) -> None:
    calls: tuple[Callable[..., Any], ...] = (llm.generate, llm.embed)
    for call in calls:
        with pytest.raises(RequestError) as found:
            call(prompt, use_tqdm=False)
        assert found.value.param == "prompt"


def test_ragged_ids_are_reported_as_such(llm: LLM) -> None:
    with pytest.raises(RequestError, match="list of token ids"):
        llm.generate({"prompt_token_ids": [[1, 2], [3]]}, use_tqdm=False)  # type: ignore[dict-item]


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", 5, ["x"], PoolingParams()])
def test_invalid_parameters_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError) as found:
        llm.generate("a", params, use_tqdm=False)
    assert found.value.param == "sampling_params"


@pytest.mark.parametrize("priority", [["a"], [1, 2], [None]])
def test_priorities_of_the_wrong_type(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError) as found:
        llm.generate("a", priority=priority, use_tqdm=False)
    assert found.value.param == "priority"


@pytest.mark.parametrize("messages", [None, 5, "text", [5], [None], [[5]]])
def test_conversations_of_the_wrong_type(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as found:
        llm.chat(messages, use_tqdm=False)
    assert found.value.param == "messages"


def test_nan_logits_end_a_request_with_an_error() -> None:
    llm = LLM(device="cpu", kv_cache_gb=0.05, max_model_len=256)
    model = llm._core._executor.model  # type: ignore[attr-defined]
    next(iter(model.norm.parameters())).data.fill_(math.nan)
    outputs = llm.generate(["a", "b c"], SamplingParams(max_tokens=4), use_tqdm=False)
    for output in outputs:
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
    assert llm.stats().broken_logits == 2
    assert llm.stats().running == 0
    with pytest.raises(BrokenLogitsError):
        llm.embed("a", use_tqdm=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": [2, "</s>"]}', "eos_token_id must be token ids, got [2, '</s>']"),
        ('{"eos_token_id": true}', "eos_token_id must be token ids, got [True]"),
        ("[]", "generation_config.json must hold a JSON object"),
        ("{", "cannot read "),
    ],
)
def test_a_generation_config_of_the_wrong_type(content: str, message: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(content)
    args = EngineArgs(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    with pytest.raises(ModelError, match=re.escape(message)):
        resolve(args)


@pytest.mark.parametrize(
    ("name", "value", "better"),
    [
        ("dtype", "fp16", "float16"),
        ("dtype", "half", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "fp16", "float16"),
    ],
)
def test_other_names_of_dtypes_are_translated(name: str, value: str, better: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got '{value}'; use {better}$"):
        EngineArgs(**{name: value})


@pytest.mark.parametrize("id", [2**31, -(2**40)])
def test_a_token_id_that_is_no_int32_is_named(id: int) -> None:
    with pytest.raises(RequestError, match=f"token id {id} is out of range, 0 to 2147483647"):
        prompt_ids([5, id], SamplingParams(), resolve(EngineArgs()), None)
