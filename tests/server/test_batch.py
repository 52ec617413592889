"""`quire run-batch`: files of requests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, EngineDeadError
from quire.server.apis.batch.lines import OutcomeFile
from quire.server.apis.batch.run import Batch, Counts
from quire.server.app import build_app
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.server_process import MODEL


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = body or {"prompt": [1, 2], "max_tokens": 3}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def run(batch: Batch, client: FakeClient | None = None) -> Counts:
    fake = client or FakeClient(tokenizer=PlainTokenizer())
    app = build_app(fake, ServerArgs(generation_config="none"))  # type: ignore[arg-type]
    return asyncio.run(asyncio.wait_for(batch.run(app, lambda counts: None), 20))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_outcomes(files: tuple[Path, Path]) -> None:
    source, target = files
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    write(source, line("a"), line("b", "/v1/chat/completions", **chat), "", line("c"))
    counts = run(Batch(source=source, target=target))
    assert (counts.total, counts.done, counts.failed, counts.before) == (3, 3, 0, 0)
    outcomes = {item["custom_id"]: item for item in read(target)}
    assert set(outcomes) == {"a", "b", "c"}
    assert len({item["id"] for item in outcomes.values()}) == 3
    for item in outcomes.values():
        assert set(item) == {"id", "custom_id", "response", "error"}
        assert item["error"] is None
        assert item["response"]["status_code"] == 200
        assert item["response"]["request_id"].startswith("req_")
    assert outcomes["a"]["response"]["body"]["choices"][0]["text"] == "one two three"
    message = outcomes["b"]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "one two three"


BAD_LINES = [
    ("{", None, "invalid_json_line"),
    ("[]", None, "invalid_request_line"),
    ('{"custom_id": "x"}', None, "invalid_request_line"),
    (line("x").replace('"method"', '"methods"'), None, "invalid_request_line"),
    (line(""), None, "invalid_custom_id"),
    (line("x" * 600), None, "invalid_custom_id"),
    (line("good"), "good", "duplicate_custom_id"),
    (line("get").replace("POST", "GET"), "get", "invalid_method"),
    (line("url", "/v1/models"), "url", "invalid_url"),
    (line("stream", prompt=[1], stream=True), "stream", "unsupported_parameter"),
    (line("back", "/v1/responses", input="x", background=True), "back", "unsupported_parameter"),
    (line("flag", prompt=[1], stream=5), "flag", "invalid_body"),
    ('{"custom_id": "l", "method": "POST", "url": "/v1/completions", "body": []}', "l",
     "invalid_body"),
]  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
def test_lines_that_cannot_run(files: tuple[Path, Path], tmp_path: Path, apart: bool) -> None:
    source, target = files
    errors = tmp_path / "errors.jsonl" if apart else None
    write(source, line("good"), *(text for text, _, _ in BAD_LINES), "x" * 30_000, line("last"))
    batch = Batch(source=source, target=target, errors=errors, max_body=1000)
    counts = run(batch)
    assert (counts.total, counts.done) == (len(BAD_LINES) + 3, len(BAD_LINES) + 3)
    assert counts.failed == len(BAD_LINES) + 1
    failures = [item for item in read(errors or target) if item["error"]]
    expected = [(id, code) for _, id, code in BAD_LINES] + [(None, "line_too_long")]
    found = [(item["custom_id"], item["error"]["code"]) for item in failures]
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert all(item["response"] is None for item in failures)
    assert {item["custom_id"] for item in read(target) if item["response"]} == {"good", "last"}
    again = run(batch)
    assert (again.done, again.before, again.failed) == (again.total, again.total, counts.failed)
    assert len(read(target)) == (2 if apart else again.total)


def test_errors_of_the_application(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, line("a", prompt=[1], nonsense=1), line("b", prompt=[1], model="gpt-x"))
    counts = run(Batch(source=source, target=target))
    outcomes = {item["custom_id"]: item["response"] for item in read(target)}
    assert counts.failed == 2
    assert (outcomes["a"]["status_code"], outcomes["b"]["status_code"]) == (400, 404)
    assert outcomes["a"]["body"]["error"]["param"] == "nonsense"


def test_a_torn_line_is_run_again(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, *(line(str(i)) for i in range(5)))
    run(Batch(source=source, target=target))
    whole = target.read_text().splitlines(keepends=True)
    target.write_text("".join(whole[:3]) + whole[3][:40])
    counts = run(Batch(source=source, target=target))
    assert (counts.before, counts.done) == (3, 5)
    assert sorted(item["custom_id"] for item in read(target)) == list("01234")


def test_a_dead_engine_ends_it(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, *(line(str(i)) for i in range(4)))
    with pytest.raises(EngineDeadError):
        run(Batch(source=source, target=target), FakeClient(error=EngineDeadError("gone")))
    assert target.read_text() == ""


def test_concurrency_is_bounded(files: tuple[Path, Path]) -> None:
    source, target = files
    write(source, *(line(str(i)) for i in range(30)))
    most = 0

    class Counting(FakeClient):
        async def generate(self, *args: Any, **options: Any) -> Any:
            nonlocal most
            open_now.append(1)
            most = max(most, len(open_now))
            async for update in super().generate(*args, **options):
                yield update
            open_now.pop()

    open_now: list[int] = []
    run(Batch(source=source, target=target, concurrency=4), Counting())
    assert most == 4
    assert len(read(target)) == 30


def test_files_are_checked(files: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = files
    with pytest.raises(ConfigError, match="no file"):
        run(Batch(source=source, target=target))
    write(source, line("a"))
    with pytest.raises(ConfigError, match="different"):
        run(Batch(source=source, target=source))
    with pytest.raises(ConfigError, match="different"):
        run(Batch(source=source, target=target, errors=target))
    with pytest.raises(ConfigError, match="cannot write"):
        run(Batch(source=source, target=tmp_path / "no" / "where"))
    write(target, "some notes", "of mine")
    with pytest.raises(ConfigError, match="line 1"):
        run(Batch(source=source, target=target))
    assert target.read_text() == "some notes\nof mine\n"
    target.unlink()
    with OutcomeFile(target), pytest.raises(ConfigError, match="another run"):
        run(Batch(source=source, target=target))


def command(source: Path, target: Path, *flags: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "quire", "run-batch", str(source), str(target), "--device", "cpu",
         "--kv-cache-gb", "0.1", "--served-model-name", MODEL, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )  # fmt: skip


def test_a_kill_and_the_rest(files: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = files
    errors = tmp_path / "errors.jsonl"
    asked = {"model": MODEL, "max_tokens": 12, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], **asked}
    lines = [line(f"t{i}", prompt=f"Story {i}:", **asked) for i in range(16)]
    lines += [line(f"c{i}", "/v1/chat/completions", **chat) for i in range(5)]
    lines += [line("e", "/v1/embeddings", model=MODEL, input=["a", "b"])]
    lines += [line("r", "/v1/responses", model=MODEL, input="Hi", max_output_tokens=4)]
    lines += [line("wrong", prompt="x", model=MODEL, temperature=-1)]
    write(source, *lines)
    first = command(source, target, "--max-concurrency", "2", "-o", str(errors))
    deadline = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.kill()
    first.communicate(timeout=30)
    done = target.read_bytes().count(b"\n")
    assert 3 <= done < 23
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_')

    second = command(source, target, "-o", str(errors))
    said = second.communicate(timeout=300)[1]
    assert second.returncode == 1
    assert said.splitlines()[-1] == f"24 lines done, {done} of them earlier; 1 failed"
    outcomes = {item["custom_id"]: item for item in read(target)}
    assert len(outcomes) == len(read(target)) == 23
    assert [item["custom_id"] for item in read(errors)] == ["wrong"]
    assert read(errors)[0]["response"]["body"]["error"]["param"] == "temperature"
    for item in outcomes.values():
        assert item["response"]["status_code"] == 200
    assert outcomes["t3"]["response"]["body"]["usage"]["completion_tokens"] == 12
    assert len(outcomes["e"]["response"]["body"]["data"]) == 2
    assert outcomes["r"]["response"]["body"]["output"]

    write(source, *lines[:-1])
    errors.unlink()
    third = command(source, target)
    said = third.communicate(timeout=300)[1]
    assert (third.returncode, said.splitlines()[-1]) == (
        0,
        "23 lines done, 23 of them earlier; 0 failed",
    )
