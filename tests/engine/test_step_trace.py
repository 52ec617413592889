"""Traces contain every step and request, and stay readable if their writer dies."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.engine.loop import trace as trace_files
from quire.engine.loop.trace import TraceFiles
from quire.errors import ConfigError
from quire.llm import LLM
from quire.sampling_params import SamplingParams
from tests.tiny_engine import TINY, model_folder

SPANS = {"plan", "submit", "wait", "update", "step", "queue", "prefill", "decode", "preempted"}
COUNTERS = {"batch", "tokens", "queue", "running", "blocks used"}


def assert_valid(events: list[dict[str, Any]]) -> None:
    """Checks that events follow the trace-event format and are consistent."""
    named = set()
    ends: dict[tuple[int, int], float] = {}
    spans = [event for event in events if event["ph"] == "X"]
    for event in events:
        assert event["ph"] in "XCM", event
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] > 0
        if event["ph"] == "C":
            assert event["name"] in COUNTERS
            assert all(isinstance(v, int) and v >= 0 for v in event["args"].values())
        else:
            assert event["name"] in SPANS
            assert event["dur"] >= 0
    for span in sorted(spans, key=lambda span: span["ts"]):
        track = span["pid"], span["tid"]
        assert track in named, span
        # Half a microsecond of rounding at each end.
        assert span["ts"] >= ends.get(track, 0.0) - 1.0, span
        ends[track] = span["ts"] + span["dur"]


def run(
    folder: Path, trace: Path, tokens: int, blocks: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Six requests; the events, and how many steps there were."""
    llm = LLM(
        str(folder),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        trace_dir=str(trace),
        num_kv_blocks=blocks,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate([[i + 1] * 20 for i in range(6)], params)
    steps, preemptions = llm.stats().steps, llm.stats().preemptions
    llm.shutdown()
    assert bool(preemptions) == (blocks is not None)
    (file,) = trace.iterdir()
    return json.loads(file.read_text()), steps


def test_steps_and_requests(tmp_path: Path) -> None:
    events, steps = run(model_folder(tmp_path / "model", TINY), tmp_path / "traces", 24)
    assert_valid(events)
    count = Counter(event["name"] for event in events if event["ph"] == "X")
    for name in ("plan", "submit", "wait", "update", "step"):
        assert count[name] == steps
    assert (count["queue"], count["prefill"], count["decode"]) == (6, 6, 6)
    on_device = [event["args"] for event in events if event["name"] == "step"]
    assert [args["step"] for args in on_device] == list(range(steps))
    assert all(args["device_us"] > 0 for args in on_device)
    assert sum(args["tokens"] for args in on_device) == 6 * (20 + 23)
    ends = [event["args"] for event in events if event["name"] == "decode"]
    for end in ends:
        delays = end.pop("delays_us")
        assert {"queue", "prefill", "decode"} <= set(delays)
        assert all(us >= 0 for us in delays.values())
    assert ends == [{"output_tokens": 24, "finish_reason": "length"}] * 6
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"host", "device", *(f"{i}/0" for i in range(1, 7))}


def test_preemptions(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    events, _ = run(folder, tmp_path / "traces", 100, blocks=16)
    assert_valid(events)
    count = Counter(event["name"] for event in events if event["ph"] == "X")
    assert count["preempted"] > 0
    assert count["queue"] == 6
    ended = [event for event in events if "finish_reason" in event.get("args", {})]
    assert len(ended) == 6


def test_files_are_bounded(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path, file_bytes=1000, most_files=3)
    files.begin = lambda: [{"name": "a name", "ph": "M"}]
    for number in range(200):
        files.write({"name": "x", "number": number})
        assert len(list(tmp_path.iterdir())) <= 3
    files.close()
    files.close()
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 3
    assert all(events[0] == {"name": "a name", "ph": "M"} for events in found)
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())
    numbers = [event["number"] for events in found for event in events if "number" in event]
    assert numbers == list(range(numbers[0], 200))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    files = TraceFiles(tmp_path, file_bytes=10, most_files=1)
    for _ in range(5):
        files.write({"name": "x"})
    files.close()
    assert (tmp_path / "notes.json").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_cannot_be_removed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples: another user's file in a folder with the sticky bit, and a folder with a trace
    file's name."""
    others = [tmp_path / "quire-1.trace.json", tmp_path / "quire-2.trace.json"]
    others[0].mkdir()
    others[1].write_text("")
    for path in others:
        os.utime(path, (0, 0))
    unlink = Path.unlink

    def sticky(self: Path, missing_ok: bool = False) -> None:
        if self == others[1]:
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", sticky)
    files = TraceFiles(tmp_path, file_bytes=10, most_files=1)
    for _ in range(5):
        files.write({"name": "x"})
    files.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert all(path.exists() for path in others)


def test_an_error_on_close_does_not_end_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def full(fd: int) -> None:
        close(fd)
        raise OSError(28, "No space left on device")

    files = TraceFiles(tmp_path, file_bytes=10, most_files=4)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", full)
        files.write({"name": "x"})
        files.write({"name": "y"})
        files.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "_FLUSH_BYTES", 50)
    files = TraceFiles(tmp_path)
    for number in range(20):
        files.write({"number": number})
    (path,) = tmp_path.iterdir()
    text = path.read_text()  # as it is now, without an end
    assert text.endswith("},\n")
    events = json.loads(text.rstrip(",\n") + "]")
    assert [event["number"] for event in events][:15] == list(range(15))
    files.close()


def test_a_full_disk_ends_the_trace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = TraceFiles(tmp_path)
    files.write({"name": "x"})

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        files.flush()
    files.write({"name": "y"})
    files.flush()
    files.close()
    assert "No space left" in caplog.text
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="trace_dir"):
        TraceFiles(tmp_path / "file" / "traces")
    with pytest.raises(ConfigError, match="trace_dir"):
        TraceFiles(tmp_path / "file")


def test_the_command(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    output = tmp_path / "out.json"
    flags = ["--model", str(folder), "--load-format", "dummy", "--device", "cpu"]
    flags += ["--skip-tokenizer-init", "--requests", "3", "--prompt-tokens", "9"]
    result = CliRunner().invoke(app, ["trace", str(output), *flags, "--output-tokens", "4"])
    assert result.exit_code == 0, result.output
    events = json.loads(output.read_text())
    assert_valid(events)
    count = Counter(event["name"] for event in events if event["ph"] == "X")
    assert count["decode"] == 4
    for wrong in (["--trace-dir", str(tmp_path)], []):
        target = output if wrong else tmp_path / "no" / "out.json"
        result = CliRunner().invoke(app, ["trace", str(target), *flags, *wrong])
        assert isinstance(result.exception, ConfigError)
