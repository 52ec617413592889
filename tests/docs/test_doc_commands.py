"""Every command of the documentation is run, or is listed here with the reason why not."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.main import app
from tests.docs.pages import ROOT, Command, block_commands, span_commands
from tests.server.server_process import Server, start_server

COMMANDS = block_commands()
CLI = typer.main.get_command(app)
OTHER_PROGRAMS = {
    "docker": "no Docker engine here; deploy.yml builds the images and chats with one by compose",
    "helm": "no cluster here; deploy.yml lints and renders the chart",
    "kubectl": "no cluster here",
    "sudo": "changes the machine; deploy.yml verifies the unit",
    "journalctl": "needs the installed unit",
    "ray": "starts a cluster of machines; tests/engine/test_ray.py has a stand-in for Ray",
    "nsys": "NVIDIA's profiler; the command behind it is run without it",
    "pip": "installs; package.yml installs the wheel in an environment of its own",
    "unzip": "takes a model out of a package of the index; tests/real does so",
    "python3": "makes the environment that everything here runs in",
    **dict.fromkeys(
        ("codex", "claude", "opencode", "qwen", "aider", "cline", "cn", "llm", "open-webui"),
        "a client; tests/server/test_agents.py replays its requests",
    ),
}
"""Programs of commands that are not run, and why."""

NOT_RUN = {
    "--nnodes": "several machines; tests/engine/test_nodes.py runs two on one",
    "bench/configs": "weights of real size; a GPU's work",
    "--tensor-parallel-size 2 --enable-expert-parallel": "the embedded model has no experts; "
    "tests/models/test_experts_parallel.py",
    '{"method": "mtp"}': "the embedded model has no such layer; tests/models/test_draft_heads.py",
    "--transport nixl": "needs the extra nixl; tests/server/test_disagg.py",
    "quire tune": "measures kernels on a GPU; tests/features/tuning",
    "--nvtx": "names what a GPU runs; the same command is run without it",
    "SmolLM2": "a published model; tests/real runs it",
    "model.gguf": "a file that is to be made, and the extra gguf; tests/models/test_gguf.py",
    "https://example.com": "a server elsewhere; tests/verify",
}
"""Parts of commands of Quire's that are parsed but not run, and why."""

SMALLER = {
    "--host-cache-gb 64": "--host-cache-gb 0.1",
    "--disk-cache-gb 500": "--disk-cache-gb 1",
    "--disk-cache /var/cache/quire": "--disk-cache blocks",
    "--case 64x512x64": "--case 4x64x8",
    "--rows 64": "--rows 4",
    "--prompt-tokens 512": "--prompt-tokens 64",
}
"""Arguments that are too large for a test, and their replacements."""


def text_of(command: Command) -> str:
    return " ".join(command.words)


def quire_commands() -> list[Command]:
    """Returns the commands of `quire`, including those started by a profiler."""
    found = []
    for command in COMMANDS:
        if command.program == "nsys":
            start = command.words.index("quire")
            command = Command(command.page, command.words[start:], command.variables)
        if command.program == "quire":
            found.append(command)
    return found


def is_run(command: Command) -> bool:
    return not any(part in text_of(command) for part in NOT_RUN)


def test_every_program_is_known() -> None:
    known = {"quire", "curl", "make", "python", "pytest", *OTHER_PROGRAMS}
    assert {command.program for command in COMMANDS} <= known
    assert len(COMMANDS) > 90


def test_reasons_are_needed() -> None:
    texts = [text_of(command) for command in COMMANDS]
    assert all(any(part in text for text in texts) for part in NOT_RUN)
    assert {command.program for command in COMMANDS} >= set(OTHER_PROGRAMS)


@pytest.mark.parametrize("command", quire_commands(), ids=str)
def test_is_parsed(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line accepts flags and values; `serve` also checks its settings together."""
    monkeypatch.chdir(folder)
    for name, value in command.variables:
        monkeypatch.setenv(name, value)
    name, *rest = command.words[1:]
    if name == "serve":
        monkeypatch.setattr("quire.cli.serve.check_folder", lambda engine: None)
        monkeypatch.setattr("quire.server.process.server.run_server", lambda *_, **more: None)
        monkeypatch.setattr("quire.engine.ranks.nodes.run_node", lambda engine: None)
        monkeypatch.setattr("quire.server.telemetry.logs.configure", lambda server: None)
        done = CliRunner().invoke(app, [name, *rest])
        # An extra may be missing here; the flag is known all the same.
        assert done.exception is None or "install" in str(done.exception), done.exception
        return
    group: Any = CLI
    while hasattr(group.commands[name], "commands"):
        group, (name, *rest) = group.commands[name], rest
    group.commands[name].make_context(name, rest)


def test_commands_in_running_text_exist() -> None:
    """Checks names of commands and flags. Any word may stand for a value."""
    for command in span_commands(("quire",)):
        group: Any = CLI
        words = [word for word in command.words[1:] if word not in ("...", "…")]
        while words and hasattr(group, "commands") and not words[0].startswith("-"):
            group = group.commands[words.pop(0)]
        known = {name for parameter in group.params for name in parameter.opts} | {"--help-all"}
        if hasattr(group, "commands"):
            known |= {
                name for each in group.commands.values() for p in each.params for name in p.opts
            }
        flags = {word for word in words if word.startswith("--")}
        assert flags <= known | {"--help", "--help-all"}, command


def test_make_has_the_targets() -> None:
    spans = span_commands(("make",))
    for command in [c for c in [*COMMANDS, *spans] if c.program == "make"]:
        done = subprocess.run(
            ["make", "--dry-run", *command.words[1:]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stderr)


def test_scripts_and_tests_have_the_flags() -> None:
    """Checks only that scripts exist: benchmarks take long, and tests/lessons runs the lessons."""
    spans = span_commands(("python", "pytest"))
    for command in [c for c in [*COMMANDS, *spans] if c.program in ("python", "pytest")]:
        words = list(command.words[1:])
        if words[:2] == ["-m", "lessons"]:
            continue
        if words[0] == "-m":
            words.pop(0)
            words[0] = "tests" if words[0] == "pytest" else words[0].replace(".", "/") + ".py"
        elif command.program == "pytest":
            words = [word.partition("::")[0] for word in words]
        assert (ROOT / words[0]).exists(), command
        if words[0].endswith(".py") and command.program == "python":
            text = (ROOT / words[0]).read_text() + (ROOT / "lessons/common.py").read_text()
            text += (ROOT / "bench/peer.py").read_text()
            flags = [word for word in words if word.startswith("--")]
            assert all(f'"{flag}"' in text for flag in flags), command


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.program == "curl"], ids=str)
def test_curl(command: Command, doc_server: Server) -> None:
    words = iter(command.words[1:])
    url, headers, body = "", {}, b""
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words).encode()
        else:
            url = word
    request = urllib.request.Request(
        url.replace("localhost:8000", doc_server.url), data=body, headers=headers
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = response.read().decode()
    assert "text" in answer or "choices" in answer or "lora" in answer.lower(), answer


QUICK = ("info", "roofline", "doctor")
"""Commands that end in a moment."""
MORE = {
    "bench": ("--case", "b1", "--scale", "0.05"),
    "profile": ("--kv-cache-gb", "0.25"),
    "quantize": ("--group-size", "32", "--samples", "8", "--length", "64"),
}
"""Further arguments that make a command short enough for a test."""
RUNS = [c for c in quire_commands() if is_run(c) and c.words[1] not in ("serve", "route")]
QUANTIZES = [c for c in RUNS if c.words[1] == "quantize"]
SERVES = [c for c in quire_commands() if is_run(c) and c.words[1] == "serve"]
ROUTES = [c for c in quire_commands() if is_run(c) and c.words[1] == "route"]


def given(command: Command) -> list[str]:
    """Returns a command's arguments, with large values replaced as in `SMALLER`."""
    words = list(command.words[1:])
    for large, small in SMALLER.items():
        for place in range(len(words) - 1):
            if words[place : place + 2] == large.split():
                words[place : place + 2] = small.split()
    return words


@pytest.mark.parametrize("command", [c for c in RUNS if c.words[1] in QUICK], ids=str)
def test_quick_commands(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    port = ["--port", "0"] if command.words[1] == "doctor" else []
    done = CliRunner().invoke(app, [*given(command), *port], catch_exceptions=False)
    assert done.exit_code in ((0, 1) if port else (0,)), done.output


def made_by(command: Command) -> str:
    """Returns the output folder of a `quire quantize` command."""
    return command.words[command.words.index("--out") + 1]


def run(command: Command, folder: Path, address: str = "") -> None:
    words = [word.replace("localhost:8000", address) for word in given(command)]
    done = subprocess.run(
        [sys.executable, "-m", "quire", *words, *MORE.get(command.words[1], ())],
        cwd=folder, input="Hi\n", capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def make_models(command: Command, folder: Path) -> None:
    """Makes the quantized models that a command needs, if no earlier test has made them."""
    for other in QUANTIZES:
        made = made_by(other)
        if other.page == command.page and made in command.words and not (folder / made).exists():
            run(other, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in RUNS if c.words[1] not in QUICK], ids=str)
def test_other_commands(command: Command, folder: Path, doc_server: Server) -> None:
    if command in QUANTIZES:
        shutil.rmtree(folder / made_by(command), ignore_errors=True)
    else:
        make_models(command, folder)
    run(command, folder, doc_server.url.removeprefix("http://"))


@pytest.mark.parametrize("command", ROUTES, ids=str)
def test_routes(command: Command, doc_server: Server) -> None:
    """One server under two names stands for the servers of the page."""
    others = {"http://10.0.0.1:8000": doc_server.url}
    others["http://10.0.0.2:8000"] = doc_server.url.replace("127.0.0.1", "localhost")
    words = [others.get(word, word) for word in given(command)]
    arguments = [sys.executable, "-m", "quire", *words, "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as router:
        try:
            assert router.stdout is not None
            url = re.findall(r"http://[\d.:]+\d", router.stdout.readline())[0]
            body = json.dumps({"model": "quire-tiny", "prompt": "Once", "max_tokens": 2}).encode()
            headers = {"content-type": "application/json"}
            ask = urllib.request.Request(f"{url}/v1/completions", body, headers)
            until_ready(url)
            with urllib.request.urlopen(ask, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 2
        finally:
            router.send_signal(signal.SIGINT)
    assert router.returncode == 0


def until_ready(url: str) -> None:
    """Waits until a router has probed its servers."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("command", SERVES, ids=str)
def test_serves(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models(command, folder)
    monkeypatch.chdir(folder)
    for name, value in command.variables:
        monkeypatch.setenv(name, value)
    running = start_server(*given(command)[1:], "--port", "0", "--host", "127.0.0.1")
    try:
        with urllib.request.urlopen(f"{running.url}/ready", timeout=300) as response:
            assert response.status == 200
    finally:
        assert running.stop() == 0
