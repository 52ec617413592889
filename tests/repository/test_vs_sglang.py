"""The adapter gives SGLang the requests that Quire gets. SGLang itself is a stand-in here."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import peer
import vs_sglang
from quire.tools.bench import record
from quire.tools.bench.cases import NAMED
from quire.tools.bench.record import read_jsonl


class FakeEngine:
    """Answers with as many tokens as asked for, less `short`, and remembers the calls."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[Any, Any]] = []
        self.short = settings.pop("short", 0)
        config = types.SimpleNamespace(vocab_size=32000, context_len=4096)
        self.tokenizer_manager = types.SimpleNamespace(model_config=config)

    def generate(self, *, input_ids: Any, sampling_params: Any) -> list[dict[str, Any]]:
        self.calls.append((input_ids, sampling_params))
        lengths = [params["max_new_tokens"] - self.short for params in sampling_params]
        return [{"meta_info": {"completion_tokens": length}} for length in lengths]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Returns the engines that are built from now on."""
    engines: list[FakeEngine] = []

    def build(**settings: Any) -> FakeEngine:
        engines.append(FakeEngine(**settings))
        return engines[-1]

    module = types.ModuleType("sglang")
    module.Engine = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.5" if name == "sglang" else known(name)
    )
    monkeypatch.setattr(record, "card_name", lambda device: "a card")
    return engines


def test_same_work_as_quire(tmp_path: Path, made: list[FakeEngine]) -> None:
    file = tmp_path / "o.jsonl"
    arguments = ["configs/qwen3-0.6b/", "--case", "nano-penalized", "--repeat", "1"]
    arguments += ["--max-model-len", "2048", "--output", str(file)]
    assert peer.main(vs_sglang.SGLANG, arguments) == 0
    (engine,) = made
    assert engine.settings == {
        "model_path": "configs/qwen3-0.6b/",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "mem_fraction_static": 0.9,
        "random_seed": 0,
        "context_length": 2048,
    }
    _, (prompts, params) = engine.calls
    work = NAMED["nano-penalized"].workload(32000)
    assert prompts == work.prompts
    assert params == [
        {
            "max_new_tokens": length,
            "ignore_eos": True,
            "temperature": 0.6,
            "top_k": 50,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
        }
        for length in work.lengths
    ]
    (found,) = read_jsonl(file)
    assert (found.case, found.versions["sglang"]) == ("nano-penalized", "0.5")
    assert found.settings["engine"] == "sglang"


def test_a_short_answer_is_no_measurement(made: list[FakeEngine]) -> None:
    arguments = ["m", "--case", "1x2x3", "--engine-args", '{"short": 1}']
    with pytest.raises(RuntimeError, match="SGLang stopped before the lengths"):
        peer.main(vs_sglang.SGLANG, arguments)


def test_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert peer.main(vs_sglang.SGLANG, ["m"]) == 2
    assert "vs_sglang: SGLang is not installed here" in capsys.readouterr().err
