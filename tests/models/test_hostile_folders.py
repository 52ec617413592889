"""Model folders and files that would block, never end, or break a library: each raises an error."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli.settings import read_file
from quire.errors import ModelError, QuireError, RequestError
from quire.models import resolve_model_path
from quire.server.apis.batch.lines import read_lines
from quire.server.args import ServerArgs
from quire.server.context.api_keys import ApiKeys
from quire.text import tokenizer_files
from quire.text.tokenizer import Tokenizer
from quire.tools.bench.online.load import file_asks
from quire.tools.evaluate import text as evaluated_text
from quire.tools.quantize import Options, Recipe, quantize
from quire.tools.quantize.work_folder import fingerprint
from quire.tools.simulate.engine_model import read_engine
from quire.tools.workload import read_trace

_EMBEDDED = resolve_model_path(None)
_ROOM = 1 << 40
"""Bytes of a sparse file."""


@pytest.fixture(autouse=True)
def _no_hangs() -> Iterator[None]:
    """Ends a test that waits for a pipe or reads an endless device."""

    def stop(*_: object) -> None:
        raise TimeoutError("a file was read without an end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of the embedded model without its weights."""
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(_EMBEDDED / name, made)
    shutil.copy(_EMBEDDED / "tokenizer_config.json", made)
    return made


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_ROOM)


def _deep(path: Path) -> None:
    path.write_text("[" * 200_000)


_KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": _pipe,
    "device": _device,
    "sparse": _sparse,
    "deep": _deep,
}


_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "quantize_config.json", "1_Pooling/config.json",
)  # fmt: skip
_TEMPLATES = "chat_template.jinja", "additional_chat_templates/a.jinja"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in _SETTINGS for kind in _KINDS),
        *((name, kind) for name in _TEMPLATES for kind in ("pipe", "device", "sparse")),
    ],
)
def test_files_of_a_model(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    _KINDS[kind](file)
    with pytest.raises(ModelError, match=file.name.removesuffix("_config.json")):
        LLM(str(folder), load_format="dummy", device="cpu")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_files_of_weights(folder: Path, name: str, kind: str) -> None:
    _KINDS[kind](folder / name)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer.model"])
def test_other_tokenizers(tmp_path: Path, name: str, kind: str) -> None:
    if name == "tiktoken.model":
        named = {"auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    _KINDS[kind](tmp_path / name)
    with pytest.raises(ModelError, match=name):
        tokenizer_files(tmp_path)


_READERS: dict[str, Callable[[Path], object]] = {
    "settings": read_file,
    "data set": lambda path: file_asks(path, 1, 1, 0),
    "text": evaluated_text.read_text,
    "trace": read_trace,
    "engine": read_engine,
    "batch": lambda path: list(read_lines(path, 1 << 20)),
    "keys": lambda path: ApiKeys(ServerArgs(api_key_file=str(path))),
}


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", _READERS)
def test_files_of_a_command(tmp_path: Path, reader: str, kind: str) -> None:
    file = tmp_path / "file"
    _KINDS[kind](file)
    with pytest.raises(QuireError, match="not a regular file"):
        _READERS[reader](file)


@pytest.mark.parametrize("reader", ["settings", "data set", "engine", "keys", "trace", "text"])
def test_files_of_a_command_without_an_end(
    tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.tools.bench.online.load.MOST_DATA", 1 << 20)
    monkeypatch.setattr(evaluated_text, "MOST_DATA", 1 << 20)
    file = tmp_path / "file"
    _sparse(file)
    with pytest.raises(QuireError):
        _READERS[reader](file)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_text_that_unpacks_to_more_than_is_read(
    tmp_path: Path,
    suffix: str,
    compress: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluated_text, "MOST_DATA", 1000)
    file = tmp_path / f"text.{suffix}"
    file.write_bytes(compress(b"a" * 1000))
    assert evaluated_text.read_text(file) == "a" * 1000
    file.write_bytes(compress(b"a" * 1001))
    with pytest.raises(QuireError, match="more than 1000 bytes"):
        evaluated_text.read_text(file)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_of_quantize(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    _KINDS[kind](file)
    with pytest.raises(OSError, match="not a regular file"):
        fingerprint(file)
    with pytest.raises(QuireError, match="not a regular file"):
        quantize(
            _EMBEDDED,
            "model",
            tmp_path / "out",
            Recipe.with_defaults("rtn", group_size=64),
            Options(data=file),
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 10**9), ("num_attention_heads", 10**400), ("head_dim", 10**9),
        ("max_position_embeddings", 10**9), ("hidden_size", 10**9), ("intermediate_size", 10**9),
        ("vocab_size", 10**9), ("num_hidden_layers", 10**9),
    ],
)  # fmt: skip
def test_sizes(folder: Path, name: str, value: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ModelError, match=f"{name} must be at most"):
        LLM(str(folder), load_format="dummy", device="cpu")


def test_weights_that_do_not_fit_the_memory(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"intermediate_size": 1 << 22, "hidden_size": 1 << 22, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json do not fit the memory"):
        LLM(str(folder), load_format="dummy", device="cpu")


def _with_pattern(folder: Path, pattern: str) -> None:
    file = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    content["pre_tokenizer"]["pretokenizers"][0] = {**split, "invert": False}
    file.write_text(json.dumps(content))


def test_a_pattern_that_fails_on_every_text(folder: Path) -> None:
    _with_pattern(folder, r"(?:\S|\s|.)+(?<=q)")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: .*retry-limit"):
        Tokenizer.from_path(folder)


def test_a_pattern_that_fails_on_some_texts(folder: Path) -> None:
    _with_pattern(folder, "(?:x+x+)+y")
    tokenizer = Tokenizer.from_path(folder)
    with pytest.raises(RequestError, match="cannot be tokenized") as told:
        tokenizer.encode("x" * 60)
    assert told.value.param == "prompt"
    assert len(tokenizer.encode("Hello"))
