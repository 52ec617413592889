"""Published models in GGUF files. `make real` fetches them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineArgs
from quire.tools.evaluate import measure_perplexity
from tests.real.prepare import GEMMA, MODELS, PROMPTS, SMOLLM2, TEXT, TOKENS, RealModel
from tests.slow import slow

pytest.importorskip("gguf")
pytestmark = pytest.mark.real

SETTINGS: dict[str, Any] = {
    "device": "cpu", "kv_cache_gb": 0.2, "max_model_len": 1024, "max_num_seqs": 8, "seed": 0,
}  # fmt: skip
EXACT = "float"
"""The setting with which weights are the file's, to the last bit."""
_REQUIRED = "QUIRE_TESTS_REAL"


@pytest.fixture(autouse=True, scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not all((model.folder / "expected.json").is_file() for model in MODELS):
        message = "the models are not there: `make real` fetches them"
        if os.environ.get(_REQUIRED):
            pytest.fail(message)
        pytest.skip(message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def greedy(llm: LLM, prompts: Any = PROMPTS, count: int = TOKENS, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


def start(model: RealModel, **more: Any) -> LLM:
    return LLM(str(model.gguf), **{**SETTINGS, **more})


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_greedy_tokens_are_those_of_transformers(model: RealModel) -> None:
    # The larger vocabulary takes its time.
    expected = model.expected()["greedy"][: 3 if model is GEMMA else None]
    llm = start(model, quantization=EXACT, dtype="float32")
    tokenizer = llm.get_tokenizer()
    for prompt, own in zip(PROMPTS, model.expected()["greedy"], strict=True):
        assert tokenizer.encode(prompt).tolist() == own["ids"]
    found = greedy(llm, [{"prompt_token_ids": own["ids"]} for own in expected])
    llm.shutdown()
    assert found == [own["tokens"] for own in expected]


def test_chat() -> None:
    """With the file's chat template and end of turn, and weights in the default format."""
    llm = start(SMOLLM2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    llm.shutdown()
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def perplexity(model: str, **more: Any) -> float:
    args = EngineArgs(model=model, **{**SETTINGS, **more})
    return measure_perplexity(args, TEXT).nats


@pytest.mark.parametrize("model", [SMOLLM2, slow(GEMMA)], ids=lambda model: model.name)
def test_perplexity_is_that_of_transformers(model: RealModel) -> None:
    """Measures the file's exact weights, its weights as served, and transformers' safetensors."""
    expected = model.expected()["nats"]
    assert perplexity(str(model.gguf), quantization=EXACT) == pytest.approx(expected, abs=1e-4)
    assert perplexity(str(model.folder)) == pytest.approx(expected, abs=1e-4)
    assert perplexity(str(model.gguf)) == pytest.approx(expected, abs=math.log(1.01))


# 8-bit floats have three bits behind the point: 1.5 % were measured.
@pytest.mark.parametrize(
    ("format", "most"), [("int8", 1.01), ("fp8", 1.03), slow("fp8_dynamic", 1.03)]
)
def test_kv_formats(format: str, most: float) -> None:
    expected = SMOLLM2.expected()["nats"]
    found = perplexity(str(SMOLLM2.gguf), quantization=EXACT, kv_cache_dtype=format)
    assert found == pytest.approx(expected, abs=math.log(most))


@pytest.mark.parametrize("speculative", [
    {"method": "suffix"},
    slow({"method": "draft", "model": str(SMOLLM2.folder), "num_speculative_tokens": 3}),
])  # fmt: skip
def test_drafts_change_nothing(speculative: dict[str, Any]) -> None:
    expected = [own["tokens"] for own in SMOLLM2.expected()["greedy"]]
    llm = start(SMOLLM2, quantization=EXACT, speculative=speculative)
    found = greedy(llm, PROMPTS[:2])
    llm.shutdown()
    assert found == expected[:2]


def test_adapters_of_peft(tmp_path: Path) -> None:
    """An adapter of random weights, large enough to change what follows."""
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2.folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(tmp_path)
    own = SMOLLM2.expected()["greedy"][0]
    ids = torch.tensor([own["ids"]])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    expected = out[0, ids.shape[1] :].tolist()
    assert expected != own["tokens"][:12]
    llm = start(SMOLLM2, quantization=EXACT, enable_lora=True)
    prompts = PROMPTS[:1]
    request = LoRARequest("own", tmp_path)
    assert greedy(llm, prompts, 12, lora_request=request) == [expected]
    assert greedy(llm, prompts, 12) == [own["tokens"][:12]]
    llm.shutdown()
