"""Log-probabilities before and after temperature and truncation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.errors import RequestError
from quire.ops.reference import truncate
from quire.runner.hooks import Level
from quire.runner.hooks.logprobs import ProcessedLogprobs, SampledLogprobs
from tests.models.checkpoints import make
from tests.slow import slow

PROMPTS = [list(range(20, 40)), [7, 3, 150, 7, 3, 150, 7, 3, 150, 7]]
DRAWN = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("logprobs")
    return folder, make(folder, "llama")


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> Iterator[LLM]:
    llm = LLM(
        str(model[0]), skip_tokenizer_init=True, max_model_len=128, block_size=4, num_kv_blocks=60,
        max_num_batched_tokens=24, speculative={"method": "suffix"},
    )  # fmt: skip
    yield llm
    llm.shutdown()


@torch.inference_mode()
def logits_of(oracle: Any, text: list[int], prompt: int) -> Tensor:
    """Returns the logits that give the tokens after the prompt, [tokens, vocab]."""
    return oracle(torch.tensor([text])).logits[0, prompt - 1 : -1].float()  # type: ignore[no-any-return]


def processed(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    rows = len(logits)
    x = logits / temperature
    return truncate.top_k_top_p(x, torch.full((rows,), top_k), torch.full((rows,), top_p))


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
)
def test_modes(model: tuple[Path, Any], llm: LLM, mode: str) -> None:
    params = SamplingParams(
        **DRAWN, seed=5, max_tokens=12, ignore_eos=True, logprobs=8, logprobs_mode=mode
    )
    for output in llm.generate(PROMPTS, params, False):
        (completion,) = output.outputs
        prompt = output.prompt_token_ids
        x = logits_of(model[1], prompt + completion.token_ids, len(prompt))
        x = processed(x, **DRAWN) if mode.startswith("processed") else x
        x = x if mode.endswith("logits") else x.log_softmax(-1)
        assert completion.logprobs is not None
        for row, token, entry in zip(x, completion.token_ids, completion.logprobs, strict=True):
            finite = int((row > -torch.inf).sum())
            best = row.topk(min(8, finite)).indices.tolist()
            assert set(entry) == {token, *best}
            for each, value in entry.items():
                assert value.logprob == pytest.approx(float(row[each]), abs=2e-4)


def test_sampling_info(model: tuple[Path, Any], llm: LLM) -> None:
    params = [
        SamplingParams(**DRAWN, seed=9, max_tokens=15, ignore_eos=True, return_sampling_info=True),
        SamplingParams(
            temperature=0.0, presence_penalty=1.0, max_tokens=7, logprobs=2,
            ignore_eos=True, return_sampling_info=True,
        ),
    ]  # fmt: skip
    first, second = llm.generate(PROMPTS, params, False)
    for output, each in ((first, params[0]), (second, params[1])):
        (completion,) = output.outputs
        info, tokens = completion.sampling_info, torch.tensor(completion.token_ids)
        assert info is not None
        prompt = output.prompt_token_ids
        x = logits_of(model[1], prompt + completion.token_ids, len(prompt))
        raw = x.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(info.raw_logprobs, raw, atol=2e-4)
        if each.temperature:
            x = processed(x, **DRAWN)
            expected = x.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            np.testing.assert_allclose(info.processed_logprobs, expected, atol=2e-4)
            assert info.mask_sizes.tolist() == (x > -torch.inf).sum(-1).tolist()
        else:
            # Penalties change the distribution. A greedy row keeps all tokens.
            assert not np.allclose(info.processed_logprobs, raw, atol=2e-4)
            assert set(info.mask_sizes.tolist()) == {x.shape[1]}
    assert first.outputs[0].logprobs is None
    assert [len(entry) for entry in second.outputs[0].logprobs or ()][:1] in ([2], [3])


def test_the_engines_mode(model: tuple[Path, Any]) -> None:
    llm = LLM(
        str(model[0]), skip_tokenizer_init=True, max_model_len=64,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    fields = {**DRAWN, "seed": 1, "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**fields), SamplingParams(**fields, logprobs_mode="raw_logprobs")]
    own, raw = llm.generate([PROMPTS[0]] * 2, params, False)
    values = [
        [entry[token].logprob for token, entry in zip(c.token_ids, c.logprobs or (), strict=True)]
        for c in (own.outputs[0], raw.outputs[0])
    ]
    assert all(mine > other for mine, other in zip(*values, strict=True))
    with pytest.raises(RequestError, match="not available with DRY"):
        llm.generate(PROMPTS, SamplingParams(logprobs=1, min_p=0.1, xtc_probability=0.5), False)
    llm.shutdown()


@pytest.mark.parametrize("ranks", [slow("tensor_parallel_size"), "pipeline_parallel_size"])
def test_ranks(model: tuple[Path, Any], llm: LLM, ranks: str) -> None:
    params = SamplingParams(
        **DRAWN, seed=2, max_tokens=6, ignore_eos=True, logprobs=3, return_sampling_info=True
    )
    several = LLM(str(model[0]), skip_tokenizer_init=True, max_model_len=64, **{ranks: 2})
    one, two = (each.generate(PROMPTS, params, False) for each in (llm, several))
    several.shutdown()
    for own, other in zip(one, two, strict=True):
        mine, theirs = own.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert mine.sampling_info is not None
        assert theirs.sampling_info is not None
        for name in ("raw_logprobs", "processed_logprobs", "mask_sizes"):
            np.testing.assert_allclose(
                getattr(theirs.sampling_info, name), getattr(mine.sampling_info, name), atol=1e-4
            )


@pytest.mark.parametrize(
    ("mode", "level"), [("raw_logprobs", Level.UNCAPTURED), ("processed_logits", Level.FULL)]
)
def test_captured_heads(mode: str, level: Level) -> None:
    """Heads of other requests have no kernels for processed values, unless the engine's mode needs
    them."""
    args = EngineArgs(logprobs_mode=mode)
    assert ProcessedLogprobs.made_for(args).head_level is level
    assert SampledLogprobs.made_for(args).head_level is Level.FULL


def test_refusals() -> None:
    with pytest.raises(RequestError, match="logprobs_mode is raw_logits"):
        SamplingParams(return_sampling_info=True, logprobs_mode="raw_logits")
    with pytest.raises(RequestError, match="not available with DRY") as caught:
        SamplingParams(return_sampling_info=True, dry_multiplier=1.0)
    assert caught.value.param == "return_sampling_info"
    with pytest.raises(RequestError, match="logprobs_mode"):
        SamplingParams(logprobs_mode="other")  # type: ignore[arg-type]
