"""The commands, as far as they run without an engine."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from quire.cli import chat as chat_module
from quire.cli.backend import ServerBackend
from quire.cli.chat import Conversation
from quire.cli.help import SUBJECTS
from quire.cli.main import app
from quire.cli.progress import TimeLeft, amount_bar, duration
from quire.cli.settings import SCHEMAS, SamplingArgs, settings_of
from quire.cli.word_wrap import WordWrap
from quire.config import EngineArgs
from quire.errors import ConfigError, RequestError
from quire.server.args import ServerArgs


def quire(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize(
    "command",
    [
        [], ["serve"], ["chat"], ["generate"], ["info"], ["bench"], ["quantize"],
        ["eval", "perplexity"], ["verify"], ["roofline"],
    ],
)  # fmt: skip
def test_help(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_help_is_short_and_names_no_flag_in_part() -> None:
    narrow = {**os.environ, "COLUMNS": "80"}
    short = quire("serve", "--help", env=narrow).stdout
    assert len(short.splitlines()) < 80
    assert "…" not in short
    assert "--port INT" in short
    assert "--cors-methods" not in short


def test_whole_help_has_every_setting() -> None:
    whole = quire("serve", "--help-all", env={**os.environ, "COLUMNS": "80"}).stdout
    for setting in (*settings_of(EngineArgs), *settings_of(ServerArgs)):
        flag = setting.name.replace("_", "-")
        if setting.argument:
            assert "MODEL" in whole
        elif setting.kind is bool:
            assert f"--[no-]{flag} " in whole
        else:
            assert f"--{flag} " in whole
    assert "…" not in whole
    assert "[default: 127.0.0.1]" in whole


def test_settings_name_panels_of_the_help() -> None:
    settings = [setting for schema in SCHEMAS for setting in settings_of(schema)]
    assert {setting.subject for setting in settings} == {"", *SUBJECTS}
    assert all(setting.subject for setting in settings if setting.common)


def test_a_taken_port_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = quire("serve", "--port", str(port))
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert "--port" in done.stderr

        # The model is checked first: on another port it would still be missing.
        done = quire("serve", "/no/such/model", "--port", str(port))
        assert done.returncode == 2
        assert "no such model folder: /no/such/model" in done.stderr


def test_missing_weights_say_what_to_do(tmp_path: Path) -> None:
    config = resources.files("quire") / "embedded" / "quire-tiny" / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    done = quire("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 2
    assert "--load-format dummy" in done.stderr


def test_time_left() -> None:
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.text(0, 4) == "0 of 4 done"
    now[0] = 30.0
    assert left.text(1, 4) == "1 of 4 done, about 2 min left"
    assert left.text(4, 4) == "4 of 4 done"
    # Layers of an earlier run took no time in this one.
    resumed = TimeLeft(before=2, clock=lambda: now[0])
    assert resumed.estimate(2, 4) == ""
    now[0] = 70.0
    assert resumed.estimate(3, 4) == "about 40 s left"


def test_progress_of_parts_that_take_long() -> None:
    now = [0.0]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, get_time=lambda: now[0])
    with amount_bar(console, "Layers", lambda: now[0]) as on_part:
        for done in range(3):
            now[0] = 600.0 * done
            on_part(done, 30)
    # Rich's estimate would have forgotten the first part.
    assert "2/30 about 4 h 40 min left" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with amount_bar(Console(file=io.StringIO()), "Layers") as on_part:
        for done in range(31):
            on_part(done, 30)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("Layers: 3 of 30 done, about ")
    assert lines[-1] == "Layers: 30 of 30 done"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "1 s"), (89, "89 s"), (91, "2 min"), (3599, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_version() -> None:
    assert quire("--version").stdout.strip() == __import__("quire").__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--block-size", "3"], "block_size must be a power of two, got 3"),
        (["serve", "--port", "70000"], "port must be in [0, 65535], got 70000"),
        (["serve", "--config", "/nonexistent.yaml"], "cannot read /nonexistent.yaml"),
        (["chat", "--url", "ftp://x"], "'ftp://x' is not an http address"),
        (["chat", "--url", "localhost:1"], "cannot reach localhost:1"),
        (["verify", "http://[::1"], "'http://[::1' is not an http address"),
        (["verify", "localhost:1", "--api-key", "a\nb"], "api_key must be printable ASCII"),
        (["chat", "--url", "a b"], "'a b' is not an http address"),
        (["bench", "serve", "--slo", "ttft:5"], "--slo needs --request-rate"),
        (["bench", "serve", "--trace", "/none"], "trace: "),
        (["bench", "serve", "--base-url", "http://a:b"], "'http://a:b' is not an http address"),
        (["simulate", "--calibrate", "localhost:1", "--out", "x"], "cannot reach localhost:1"),
        (["route", "http://[::1"], "'http://[::1' is not an http address"),
        (["serve", "--otlp-endpoint", "http://[::1"], "otlp_endpoint must be a URL"),
        (["bench", "throughput", "--case", "zzz"], "unknown case 'zzz'"),
        (["chat", "--base-url", "a b"], "'a b' is not an http address"),
        (["bench", "serve", "--url", "http://a:b"], "'http://a:b' is not an http address"),
        (
            ["serve", "--dtype", "fp16"],
            "--dtype must be one of auto, float32, float16, bfloat16, got 'fp16': use float16",
        ),
        (["tune", "--dtype", "bfloat"], "got 'bfloat': did you mean bfloat16?"),
        (["serve", "--port", "abc"], "--port must be an integer, got 'abc'"),
        (["chat", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["doctor", "--port", "99999"], "--port must be an integer from 0 to 65535, got '99999'"),
        (["verify", "x", "--timeout", "0"], "--timeout must be a number of at least 0.1, got '0'"),
        (["tune", "--rows", "3", "--rows", "x"], "--rows must be an integer from 1 to 256, got"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = quire(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("quire: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "variable", "value", "message"),
    [
        ("serve", "QUIRE_PORT", "abc", "QUIRE_PORT must be an integer, got 'abc'"),
        ("serve", "QUIRE_PORT", "70000", "QUIRE_PORT: port must be in [0, 65535], got 70000"),
        ("info", "QUIRE_DTYPE", "bf16", "QUIRE_DTYPE must be one of auto,"),
        ("info", "QUIRE_ENFORCE_EAGER", "x", "QUIRE_ENFORCE_EAGER must be true or false, got 'x'"),
        ("route", "QUIRE_ADMIN_API_KEY", "a b", "QUIRE_ADMIN_API_KEY: admin_api_key must be"),
        ("serve", "QUIRE_BLOCK_SIZE", "3", "QUIRE_BLOCK_SIZE: block_size must be a power of two"),
    ],
)
def test_mistakes_in_variables_name_them(
    command: str, variable: str, value: str, message: str
) -> None:
    done = quire(command, env={**os.environ, variable: value})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"quire: {message}")


def test_a_flag_is_not_blamed_on_its_variable() -> None:
    done = quire("serve", "--port", "70000", env={**os.environ, "QUIRE_PORT": "8000"})
    assert done.stderr == "quire: port must be in [0, 65535], got 70000\n"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_helps_name_types(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    types = {"INT", "NUMBER", "TEXT", "NAME", "FILE", "JSON"}
    for option in ALL[path].params:
        if option.param_type_name == "option" and not option.is_flag:
            flags = re.escape(", ".join(sorted(option.opts, key=len, reverse=True)))
            # Most settings are left to --help-all.
            for word in re.findall(rf"^│ {flags} (\S+)", done.stdout, re.MULTILINE):
                assert word in types | {option.metavar}
    assert "--help, -h " in done.stdout


def test_groups_help_as_commands_do() -> None:
    for path in ([], ["bench"], ["eval"]):
        done = CliRunner().invoke(app, [*path, "--help"])
        assert done.stdout.strip() == CliRunner().invoke(app, path).output.strip()
        assert "│ --help, -h " in done.stdout
        assert "<bool>" not in done.stdout


def test_pairs_of_flags() -> None:
    done = CliRunner().invoke(app, ["quantize", "--help"])
    assert "--symmetric/--asymmetric" in done.stdout


def test_words_stay_whole_at_the_edge() -> None:
    def shown(text: str, width: int | None = 12) -> str:
        for size in (1, 3, 100):
            wrap = WordWrap(width)
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            found = "".join([wrap.add(piece) for piece in pieces] + [wrap.end()])
        return found

    assert shown("one two three four") == "one two \nthree four"
    assert shown("twelve chars and") == "twelve chars\nand"
    assert shown("a\n  indented line") == "a\n  indented \nline"
    # A word longer than a line is left to the terminal: 13 columns end in the first of a line.
    assert shown("abcdefghijklm 1234567890 x") == "abcdefghijklm 1234567890\nx"
    assert shown("汉字汉字汉字汉字") == "汉字汉字汉字\n汉字"
    assert shown("one two three four", None) == "one two three four"


def test_wide_characters_are_shown_at_once() -> None:
    wrap = WordWrap(80)
    assert wrap.add("汉字") == "汉字"
    assert wrap.add("word") == ""
    assert wrap.add(" and") == "word "


def test_a_full_disk_is_one_line() -> None:
    done = quire("bench", "cache", "--output", "/dev/full")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "quire: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    "arguments", [["serve", "--no-such"], ["serve", "--port", "x"], ["nothing"], ["generate"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    done = quire(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_unknown_key_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_num_seq: 4")
    done = quire("serve", "--config", str(file))
    assert done.returncode == 2
    assert "unknown setting 'max_num_seq'. Did you mean 'max_num_seqs'?" in done.stderr


class FakeBackend:
    """Answers with the number of messages, and calls a test's function in between."""

    model = "fake"

    def __init__(self, *failures: BaseException | None) -> None:
        self.failures = list(failures)
        self.seen: list[list[dict[str, str]]] = []

    def chat(
        self, messages: list[dict[str, str]], sampling: dict[str, Any]
    ) -> Generator[str, None, None]:
        self.seen.append([dict(message) for message in messages])
        yield f"answer {len(messages)}"
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        yield " [end]"

    def close(self) -> None:
        pass


def talk(
    monkeypatch: pytest.MonkeyPatch,
    backend: FakeBackend,
    *lines: str | type[BaseException],
    console: Mapping[str, Any] | None = None,
) -> tuple[str, list[dict[str, str]]]:
    """Types the lines, then Ctrl-D; returns the screen and the conversation."""
    left = list(lines)

    def read(_: Conversation) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(Conversation, "_read", read)
    screen = io.StringIO()
    terminal = Console(file=screen, **{"width": 200, **(console or {})})
    conversation = Conversation(terminal, backend, SamplingArgs(), "Be brief.")
    conversation.run()
    return screen.getvalue(), conversation.messages


def test_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    screen, messages = talk(monkeypatch, backend, "one", "", "two", "/help", "/what")
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == "answer 2 [end]"
    assert "answer 4 [end]" in screen
    assert "/reset" in screen
    assert "unknown command /what" in screen


def test_a_terminal_gets_whole_words_and_no_emoji(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend(FakeBackend):
        def chat(self, *_: Any) -> Generator[str, None, None]:
            yield from ("words that do", " not fit in", "to :fire: li", "nes")

    screen, messages = talk(
        monkeypatch, Backend(), "one", console={"width": 16, "force_terminal": True}
    )
    assert "words that do \nnot fit into \n:fire: lines\n" in screen
    assert messages[-1]["content"] == "words that do not fit into :fire: lines"


def test_reset_and_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    _, messages = talk(monkeypatch, backend, "one", "/reset", "two", "/exit", "never")
    assert [m["content"] for m in messages] == ["Be brief.", "two", "answer 2 [end]"]
    assert len(backend.seen) == 2


def test_interrupt_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(KeyboardInterrupt())
    screen, messages = talk(monkeypatch, backend, "one", KeyboardInterrupt, "two")
    assert [m["content"] for m in messages[1:]] == ["one", "answer 2", "two", "answer 4 [end]"]
    assert "stopped" in screen
    assert "Ctrl-D leaves" in screen


def test_refused_message_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(RequestError("too long: [x]"))
    screen, messages = talk(monkeypatch, backend, "one", "two")
    assert "too long: [x]" in screen
    assert [m["content"] for m in messages[1:]] == ["two", "answer 2 [end]"]


def test_chat_module_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Closing(FakeBackend):
        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(chat_module, "ServerBackend", lambda url, key: Closing())
    monkeypatch.setattr(Conversation, "run", lambda self: None)
    done = CliRunner().invoke(app, ["chat", "--url", "x"])
    assert done.exit_code == 0
    assert closed == [True]


def test_server_backend_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="cannot reach"):
        ServerBackend("http://127.0.0.1:9")
