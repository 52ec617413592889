"""The adapter gives vLLM the requests that Quire gets. vLLM itself is a stand-in here."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

import peer
import vs_vllm
from quire.tools.bench import record, startup
from quire.tools.bench.cases import NAMED
from quire.tools.bench.record import read_jsonl


class FakeParams:
    def __init__(self, **given: Any) -> None:
        self.given = given


class FakeLLM:
    """Answers with as many tokens as asked for, and remembers the calls."""

    made: ClassVar[list[FakeLLM]] = []
    short = 0

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[list[Any], list[FakeParams]]] = []
        config = types.SimpleNamespace(get_vocab_size=lambda: 32000, max_model_len=4096)
        self.llm_engine = types.SimpleNamespace(model_config=config)
        FakeLLM.made.append(self)

    def generate(self, prompts: list[Any], params: list[FakeParams], *, use_tqdm: bool) -> Any:
        self.calls.append((prompts, params))
        lengths = [p.given["max_tokens"] - self.short for p in params]
        return [
            types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * n)])
            for n in lengths
        ]


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("vllm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    module.SamplingParams = FakeParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.26.0" if name == "vllm" else known(name)
    )
    monkeypatch.setattr(record, "card_name", lambda device: "a card")
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "short", 0)
    return FakeLLM


def test_same_work_as_quire(tmp_path: Path, fake_vllm: type[FakeLLM]) -> None:
    file = tmp_path / "o.jsonl"
    arguments = ["configs/llama-2-7b/", "--case", "nano-penalized", "--case", "2x3x4", "--case"]
    assert (
        peer.main(vs_vllm.VLLM, [*arguments, "ttft", "--repeat", "1", "--output", str(file)]) == 0
    )
    (llm,) = fake_vllm.made
    assert llm.settings == {
        "model": "configs/llama-2-7b/",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
        "seed": 0,
    }
    warm_up, run, *rest = llm.calls
    work = NAMED["nano-penalized"].workload(32000)
    assert [prompt["prompt_token_ids"] for prompt in run[0]] == work.prompts
    assert [p.given for p in run[1]] == [
        {
            "max_tokens": length,
            "ignore_eos": True,
            "detokenize": False,
            "temperature": 0.6,
            "top_k": 50,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
        }
        for length in work.lengths
    ]
    assert len(warm_up[0]) == 4
    # Warm-up and run of the free case; twelve prompts each of the two lengths that fit.
    assert [len(prompts) for prompts, _ in rest] == [2, 2, *[1] * 24]
    nano, free, ttft = read_jsonl(file)
    assert (nano.case, nano.model, nano.card) == ("nano-penalized", "llama-2-7b", "a card")
    assert nano.versions["vllm"] == "0.26.0"
    assert nano.settings["engine"] == "vllm"
    assert nano.metrics["output_tokens"] == work.output_tokens
    assert free.metrics["requests"] == 2
    assert set(ttft.metrics) == {"ttft_512_ms", "ttft_2048_ms"}


def test_start_in_fresh_processes(
    monkeypatch: pytest.MonkeyPatch, fake_vllm: type[FakeLLM], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def measure(command: list[str], **options: Any) -> dict[str, Any]:
        asked.append((command, options))
        return {"first_token_s": 70.0, "device": "cuda"}

    monkeypatch.setattr(peer.startup, "measure", measure)
    file = tmp_path / "o.jsonl"
    arguments = ["m", "--case", "startup", "--repeat", "1", "--output", str(file)]
    assert peer.main(vs_vllm.VLLM, arguments) == 0
    ((command, options),) = asked
    assert command[2:] == [*arguments, "--first-token"]
    assert command[1].endswith("vs_vllm.py")
    assert (options["cold"], options["repeat"]) == (False, 1)
    (found,) = read_jsonl(file)
    assert (found.case, found.metrics) == ("startup", {"first_token_s": 70.0})
    assert fake_vllm.made == []


def test_a_start_reports_its_phases(
    capsys: pytest.CaptureFixture[str], fake_vllm: type[FakeLLM]
) -> None:
    assert peer.main(vs_vllm.VLLM, ["m", "--first-token"]) == 0
    moments = json.loads(capsys.readouterr().out)
    found = startup.phases(moments, moments["started"], moments["first_token"])
    assert found["first_token_s"] == pytest.approx(sum(found[name] for name in startup.PHASES))
    ((prompts, params),) = fake_vllm.made[0].calls
    assert len(prompts[0]["prompt_token_ids"]) == 16
    assert params[0].given["max_tokens"] == 1


def test_a_short_answer_is_no_measurement(fake_vllm: type[FakeLLM]) -> None:
    fake_vllm.short = 1
    with pytest.raises(RuntimeError, match="stopped before the lengths"):
        peer.main(vs_vllm.VLLM, ["m", "--case", "1x2x3"])


def test_engine_arguments(fake_vllm: type[FakeLLM]) -> None:
    given = ["--max-model-len", "64", "--engine-args", '{"max_num_seqs": 512, "seed": 1}']
    assert peer.main(vs_vllm.VLLM, ["m", "--case", "1x2x3", *given]) == 0
    settings = fake_vllm.made[0].settings
    assert (settings["max_model_len"], settings["max_num_seqs"], settings["seed"]) == (64, 512, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--case", "zzz"], "unknown case 'zzz'"),
        (["m", "--case", "16x8192x128"], "needs sequences of 8320 tokens"),
    ],
)
def test_mistakes_in_arguments_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peer.main(vs_vllm.VLLM, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_engine_arguments_must_be_an_object(text: str) -> None:
    with pytest.raises(SystemExit):
        peer.parse(vs_vllm.VLLM, ["m", "--engine-args", text])


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert peer.main(vs_vllm.VLLM, ["m"]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err
