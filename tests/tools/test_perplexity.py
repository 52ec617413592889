"""`quire eval perplexity` compared with transformers, and refused texts."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineArgs
from quire.errors import ConfigError
from quire.tools.evaluate import measure_perplexity, read_text, windows_of
from quire.tools.quantize import Options, Recipe, quantize
from tests.models.checkpoints import make
from tests.models.small_tokenizer import CHARACTERS, save_tokenizer

SETTINGS: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.05, "max_num_seqs": 4}


def text(count: int = 400) -> str:
    return "".join(random.Random(0).choices(CHARACTERS[1:], k=count))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(text(), "utf-8")
    return file


def checkpoint(folder: Path, case: str) -> Any:
    folder.mkdir()
    model = make(folder, case)
    save_tokenizer(folder)
    return model


def expected(
    model: Any, ids: list[int], window: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nats of each counted token and their logits, as in transformers' guide to
    perplexity."""
    nats, logits, seen = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        part = torch.tensor([ids[begin:end]])
        with torch.inference_mode():
            found = model(part).logits[0, :-1].double()
        own = max(seen - begin, 1) - 1
        scores = found.log_softmax(-1).gather(1, part[0, 1:, None]).squeeze(1)
        nats.append(-scores[own:])
        logits.append(found[own:])
        seen = end
        if end == len(ids):
            break
    return torch.cat(nats), torch.cat(logits)


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "qwen3", "gpt2"])
@pytest.mark.parametrize(("window", "stride"), [(64, 64), (64, 24)])
def test_equals_transformers(
    case: str, window: int, stride: int, data: Path, tmp_path: Path
) -> None:
    oracle = checkpoint(tmp_path / "model", case)
    ids = save_tokenizer(tmp_path / "model").encode(text()).ids
    # Windows are computed in chunks, several in a step.
    args = EngineArgs(model=str(tmp_path / "model"), max_num_batched_tokens=48, **SETTINGS)
    found = measure_perplexity(args, data, window=window, stride=stride)
    nats, _ = expected(oracle, ids, window, stride)
    assert found.tokens == len(nats) == found.bytes
    assert found.nats == pytest.approx(nats.mean().item(), rel=1e-4)
    assert found.perplexity == pytest.approx(nats.mean().exp().item(), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nats.mean().item() / math.log(2), rel=1e-4)
    assert found.kl is None


def test_divergence_from_the_base(data: Path, tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "own", "llama")
    base = checkpoint(tmp_path / "base", "llama-mha")
    ids = save_tokenizer(tmp_path / "own").encode(text()).ids
    args = EngineArgs(model=str(tmp_path / "own"), **SETTINGS)
    found = measure_perplexity(args, data, base=str(tmp_path / "base"), window=50, limit=180)
    nats, logits = expected(own, ids[:180], 50, 50)
    base_nats, base_logits = expected(base, ids[:180], 50, 50)
    ours, theirs = logits.log_softmax(-1), base_logits.log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    assert found.nats == pytest.approx(nats.mean().item(), rel=1e-4)
    assert found.base is not None
    assert found.base.nats == pytest.approx(base_nats.mean().item(), rel=1e-4)
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert found.as_dict()["base"]["perplexity"] == found.base.perplexity


def test_a_model_diverges_from_itself_as_it_is_rounded(data: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", "qwen3")
    args = EngineArgs(model=str(tmp_path / "model"), quantization="int8", **SETTINGS)
    found = measure_perplexity(args, data, base=str(tmp_path / "model"), window=100)
    assert found.kl is not None
    assert 0 < found.kl < 0.05


@given(
    count=st.integers(2, 200),
    size=st.integers(2, 60),
    stride=st.integers(1, 60),
)
def test_each_token_but_the_first_counts_once_where_windows_overlap(
    count: int, size: int, stride: int
) -> None:
    tokens = np.arange(count, dtype=np.int32)
    if stride > size:
        with pytest.raises(ConfigError, match="stride"):
            windows_of(tokens, size, stride)
        return
    windows = windows_of(tokens, size, stride)
    counted = [int(token) for each in windows for token in each.tokens[each.first :]]
    left_out = range(0, count, size) if stride == size else range(1)
    assert counted == [token for token in range(count) if token not in left_out]
    places = [each.place for each in windows]
    assert places == [sum(e.counted for e in windows[:i]) for i in range(len(windows))]
    assert all(len(each.tokens) <= size and each.first >= 1 for each in windows)


def test_refusals(data: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", "llama")
    checkpoint(tmp_path / "other", "llama")
    save_tokenizer(tmp_path / "other", CHARACTERS[::-1])
    args = EngineArgs(model=str(tmp_path / "model"), **SETTINGS)
    empty, short, binary = tmp_path / "empty", tmp_path / "short", tmp_path / "binary.xz"
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(b"hello world")[:10] + bytes(range(250, 256)))
    empty.write_text(" \n")
    short.write_text("a")
    binary.write_bytes(b"abc")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (empty, {}, "is empty"),
        (short, {}, "the text has 1 token, but it needs at least 2"),
        (binary, {}, "cannot read"),
        (damaged, {}, "cannot read"),
        (tmp_path / "absent", {}, "cannot read"),
        (data, {"window": 257}, "window=257, but the model takes 256"),
        (data, {"window": 1}, "window must be at least 2"),
        (data, {"window": 16, "stride": 17}, "stride"),
        (data, {"stride": 0}, "stride"),
        (data, {"limit": 1}, "limit"),
        (data, {"base": str(tmp_path / "other")}, "a different tokenizer"),
    ]
    for file, more, message in cases:
        with pytest.raises(ConfigError, match=message):
            measure_perplexity(args, file, **more)


def test_compressed_text(tmp_path: Path) -> None:
    file = tmp_path / "text.xz"
    file.write_bytes(lzma.compress("Ünïcödé".encode()))
    assert read_text(file) == "Ünïcödé"


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a little dog. " * 20, "utf-8")
    command = [sys.executable, "-m", "quire", "eval", "perplexity", "--data", str(file)]
    done = subprocess.run(
        [*command, "--json", "--device", "cpu", "--window", "64"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats"]))
    assert found["bytes"] <= file.stat().st_size
    file.write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "is empty" in done.stderr


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Refuses a text with tokens that were added to the tokenizer, but not to the model."""
    checkpoint(tmp_path / "model", "llama")
    added = "".join(chr(code) for code in range(0x400, 0x500))
    save_tokenizer(tmp_path / "model", CHARACTERS + added)
    file = tmp_path / "text.txt"
    file.write_text(text() + added, "utf-8")
    with pytest.raises(ConfigError, match="token id 354, but the model's vocabulary ends at 210"):
        measure_perplexity(EngineArgs(model=str(tmp_path / "model"), **SETTINGS), file)
    options = Options(data=file, samples=6, length=32)
    with pytest.raises(ConfigError, match="token id 354, but the model's vocabulary ends at 210"):
        quantize(
            tmp_path / "model",
            "tiny",
            tmp_path / "out",
            Recipe.with_defaults("rtn", group_size=16),
            options,
        )
