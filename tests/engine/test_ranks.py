"""Engines of several ranks: their tokens, their refusals, and what happens when a rank is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.engine.ranks.ranks import config_of_rank
from quire.engine.ranks.workers import WorkerExecutor
from quire.errors import ConfigError, EngineDeadError
from quire.models import spec_from_config
from tests.features.speculation.test_speculation import free_of_charge
from tests.slow import slow
from tests.tiny_engine import (
    TINY,
    TINY_EXPERTS,
    VOCAB,
    Job,
    TinyEngine,
    model_folder,
    random_prompts,
)

PLAIN: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2, **PLAIN),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1, **PLAIN),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=2, n=2, **PLAIN),
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, structured_outputs={"regex": "[0-9]+"}),
]
HEAD: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 2}
WITHOUT = "pipeline_parallel_size", "speculative"
"""Settings that the engine with which tokens are compared does not have."""


def completions(ranks: int, **settings: Any) -> list[list[int]]:
    """Returns the embedded model's tokens for prompts that share a beginning, two at a time."""
    llm = LLM(
        device="cpu",
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=256,
        tensor_parallel_size=ranks,
        **{"num_kv_blocks": 64, **settings},
    )
    try:
        shared = "The gatherings of a book are sewn one to another, and so are pages. "
        prompts = [shared * (i % 3) + f"Page {i}:" for i in range(8)]
        free_of_charge(llm)
        outputs = llm.generate(prompts, [PARAMS[i % 4] for i in range(8)], use_tqdm=False)
        stats, args, drafts = llm.stats().ranks, llm.config.args, llm.stats().speculation
        assert drafts is None or sum(source.drafted for source in drafts.sources.values()) > 0
        assert len(stats) == (args.ranks // args.nnodes if args.ranks > 1 else 0)
        for rank in stats:
            assert min(rank.steps, rank.device_seconds, rank.weight_bytes, rank.kv_bytes) > 0
        return [list(choice.token_ids) for output in outputs for choice in output.outputs]
    finally:
        llm.shutdown()


def test_an_engine_that_ended_leaves_the_next_one_alone() -> None:
    """The finalizer of an `LLM` may end it again while another one runs."""

    def engine() -> LLM:
        return LLM(
            device="cpu",
            max_num_seqs=2,
            num_kv_blocks=16,
            max_model_len=64,
            tensor_parallel_size=2,
        )

    first = engine()
    first.shutdown()
    second = engine()
    first.shutdown()
    params = SamplingParams(temperature=0.0, **PLAIN)
    (output,) = second.generate("One day", params, use_tqdm=False)
    second.shutdown()
    assert len(output.outputs[0].token_ids) == PLAIN["max_tokens"]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"speculative": {"method": "suffix", "num_speculative_tokens": 3}}),
        slow(2, {"num_kv_blocks": 18, "quantization": "int8"}),
        slow(4, {"kv_cache_dtype": "int8"}),
        (2, {"pipeline_parallel_size": 2, "num_kv_blocks": 18, "kv_cache_dtype": "int8"}),
        (1, {"pipeline_parallel_size": 2, "num_kv_blocks": 24, "speculative": HEAD}),
        slow(2, {"pipeline_parallel_size": 2, "num_kv_blocks": 24, "speculative": HEAD}),
        slow(2, {"pipeline_parallel_size": 2, "speculative": {"num_speculative_tokens": 3}}),
    ],
    ids=[
        "2-drafts",
        "2-few-blocks-int8",
        "4-kv-int8",
        "2-by-2-stages",
        "stages-head",
        "2-by-2-stages-head",
        "2-by-2-stages-draft",
    ],
)
def test_ranks_give_the_tokens_of_one(ranks: int, settings: dict[str, Any]) -> None:
    """Chunked prompts, prefix hits, preemption, a grammar, drafts; at 4 ranks, KV heads that two
    ranks hold, and two stages of two ranks."""
    found = completions(ranks, **settings)
    plain = {name: value for name, value in settings.items() if name not in WITHOUT}
    assert found == completions(1, **plain)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, **settings))
    return str(error.value)


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TINY)
    assert "4 attention heads cannot be split over 8 ranks" in refusal(
        folder, tensor_parallel_size=8
    )
    assert refusal(folder, tensor_parallel_size=3).endswith("the model allows 2, 4")
    single = {**TINY, "num_attention_heads": 1, "num_key_value_heads": 1}
    lone = model_folder(tmp_path / "lone", single)
    assert refusal(lone, tensor_parallel_size=2).endswith("the model allows only 1")


@pytest.mark.parametrize(
    ("name", "size"),
    [("disk_cache", "tensor_parallel_size"), ("host_cache_gb", "pipeline_parallel_size")],
)
def test_settings_that_take_one_rank(tmp_path: Path, name: str, size: str) -> None:
    tiers = {"host_cache_gb": 1.0, **({"disk_cache": "/x"} if name == "disk_cache" else {})}
    message = refusal(model_folder(tmp_path, TINY), **{size: 2}, **tiers)
    assert message.startswith(f"{name} is not supported with {size}=2")


UNEVEN = {**TINY_EXPERTS, "moe_intermediate_size": 40}
"""Two ranks have 16 and 24 hidden units."""


def bits(ranks: int, **settings: Any) -> list[tuple[list[int], list[float]]]:
    """Returns the embedded model's tokens with their log-probabilities, under `deterministic`."""
    llm = LLM(
        device="cpu", max_model_len=128, num_kv_blocks=64, deterministic=True,
        tensor_parallel_size=ranks, **settings,
    )  # fmt: skip
    try:
        prompts = ["The pages of a book are sewn. " * (i % 3) + f"Page {i}:" for i in range(6)]
        params = [
            SamplingParams(temperature=0.0, logprobs=1, max_tokens=8, ignore_eos=True),
            SamplingParams(temperature=0.9, seed=4, logprobs=1, max_tokens=8, ignore_eos=True),
        ]
        outputs = llm.generate(prompts, [params[i % 2] for i in range(6)], use_tqdm=False)
        found = []
        for choice in (output.outputs[0] for output in outputs):
            told = choice.logprobs or []
            pairs = zip(choice.token_ids, told, strict=True)
            found.append((list(choice.token_ids), [each[token].logprob for token, each in pairs]))
        return found
    finally:
        llm.shutdown()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {"max_num_seqs": 3, "max_num_batched_tokens": 16}),
        slow(2, {"quantization": "w8a8", "max_num_seqs": 2}),
        slow(2, {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}),
    ],
    ids=["4", "2-w8a8", "2-by-2-stages"],
)
def test_ranks_have_the_bits_of_one(ranks: int, settings: dict[str, Any]) -> None:
    """This holds even if one rank runs other steps."""
    found = bits(ranks, **settings)
    alike = {"quantization", "kv_cache_dtype"} & set(settings)
    assert found == bits(1, **{name: settings[name] for name in alike})


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (TINY, {"lora_dir": "/x"}, "LoRA adapters on a CPU"),
        (TINY_EXPERTS, {"enable_expert_parallel": True}, "with enable_expert_parallel: ranks add"),
        (UNEVEN, {}, r"mlp: ranks cannot have equal parts of its 40 inputs$"),
        (
            TINY, {"quantization": "int4"},
            r"attention.out: ranks .* parts of its 64 inputs, in whole groups of 128$",
        ),
        (TINY_EXPERTS, {"quantization": "w8a8"}, "mlp: each rank rounds its hidden units"),
    ],
    ids=["lora", "experts", "width", "groups", "scales"],
)  # fmt: skip
def test_settings_that_rule_out_deterministic_results_are_refused(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    folder = model_folder(tmp_path, config)
    with pytest.raises(ConfigError, match=reason):
        resolve(EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True,
                           deterministic=True, tensor_parallel_size=2, **settings))  # fmt: skip


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    args = EngineArgs(model=str(model_folder(tmp_path, TINY)), device="cuda:1",
                      tensor_parallel_size=2, skip_tokenizer_init=True)  # fmt: skip
    with pytest.raises(ConfigError, match=r"2 GPUs .* from cuda:1 on, .* sees 2 .*DEVICES=4,5"):
        resolve(args)


def test_ranks_have_neighbouring_devices(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, TINY))
    config = resolve(EngineArgs(model=folder, device="cpu", skip_tokenizer_init=True))
    assert config_of_rank(config, 1).device == "cpu"
    for device, expected in (("cuda", "cuda:1"), ("cuda:2", "cuda:3")):
        object.__setattr__(config, "device", device)
        assert config_of_rank(config, 1).device == expected


def engine_of(folder: Path, ranks: int, timeout: float | None = None, **more: Any) -> TinyEngine:
    return TinyEngine(folder, depth=2, budget=64, world=ranks, timeout=timeout, **more)


@pytest.mark.parametrize(("lost", "stages"), [(1, 1), (3, 2)])
def test_a_rank_that_is_killed(tmp_path: Path, lost: int, stages: int) -> None:
    """The error names the rank, and the other ranks' processes end. Of two stages rank 3 is in the
    first."""
    engine = engine_of(model_folder(tmp_path, TINY), 4, stages=stages)
    executor = engine.executor
    assert isinstance(executor, WorkerExecutor)
    others = executor.workers
    engine.add("a", Job(random_prompts(1)[0], SamplingParams(max_tokens=40)))
    engine.step()
    os.kill(others[lost - 1].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"rank {lost} has ended .killed by SIGKILL"):
        engine.drain()
    executor.shutdown()
    assert all(other.process.returncode is not None for other in others)


def test_an_error_at_the_start_of_ranks_is_reported() -> None:
    """All ranks fail in the same way; the error must not be that another rank has ended."""
    reason = "the draft head: 2 attention heads cannot be split over 4 ranks"
    with pytest.raises(ConfigError, match=reason) as raised:
        LLM(device="cpu", tensor_parallel_size=4, speculative={"method": "eagle3"})
    assert raised.value.param == "speculative"


def test_a_step_that_does_not_end(tmp_path: Path) -> None:
    """The error says which rank is behind, and at which step."""
    engine = engine_of(model_folder(tmp_path, TINY), 2, timeout=2.0)
    executor = engine.executor
    assert isinstance(executor, WorkerExecutor)
    engine.add("a", Job(random_prompts(1)[0], SamplingParams(max_tokens=40)))
    engine.step()
    other = executor.workers[0].process
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 is behind .*rank 1 has launched step \d"):
        engine.drain()
    executor.shutdown()
    assert other.returncode is not None
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collect()


def test_a_model_of_few_heads_has_copies_of_them(tmp_path: Path) -> None:
    """At four ranks each of two KV heads is held twice."""
    folder = model_folder(tmp_path, {**TINY, "vocab_size": VOCAB + 3})
    spec = spec_from_config({**TINY, "vocab_size": VOCAB + 3})
    assert spec.vocab_size % 4
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=8)) for prompt in
            random_prompts(4)]  # fmt: skip
    four, one = engine_of(folder, 4), engine_of(folder, 1)
    try:
        assert four.run(jobs) == one.run(jobs)
        quarter, whole = (e.runner.cache.block_tensors(0)[0].numel() for e in (four, one))
        assert quarter * 2 == whole
    finally:
        four.executor.shutdown()
