"""Flags, variables and the file: one schema, in this order."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.settings import SCHEMAS, SamplingArgs, read_file, settings_of, with_settings
from quire.config import EngineArgs
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.server.args import ServerArgs


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch):
    """Runs a command with all schemas and returns its settings."""
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @with_settings(EngineArgs, ServerArgs, SamplingArgs)
    def command(*, engine: EngineArgs, server: ServerArgs, sampling: SamplingArgs) -> None:
        seen.update(engine=engine, server=server, sampling=sampling)

    def run(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        seen.clear()
        result = CliRunner().invoke(app, list(arguments), env=env or {})
        if isinstance(result.exception, ConfigError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return dict(seen)

    return run


def test_defaults_are_the_dataclasses(resolve) -> None:
    assert resolve() == {
        "engine": EngineArgs(),
        "server": ServerArgs(),
        "sampling": SamplingArgs(),
    }


def test_precedence(resolve, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nmax-num-seqs: 11\nblock_size: 32\nseed: 3\n")
    env = {"QUIRE_PORT": "2", "QUIRE_MAX_NUM_SEQS": "22"}
    got = resolve("--config", str(file), "--port", "3", env=env)
    assert got["server"].port == 3
    assert got["engine"].max_num_seqs == 22
    assert got["engine"].block_size == 32
    assert got["engine"].seed == 3
    assert resolve(env={"QUIRE_CONFIG": str(file)})["server"].port == 1


@pytest.mark.parametrize("schema", [EngineArgs, ServerArgs])
def test_every_field_is_a_setting(schema: type[Any]) -> None:
    settings = {setting.name: setting for setting in settings_of(schema)}
    fields = [f.name for f in dataclasses.fields(schema) if not f.metadata.get("internal")]
    assert list(settings) == fields
    assert all(setting.help for setting in settings.values())


def test_flags_of_sampling_are_declared_parameters(resolve, tmp_path: Path) -> None:
    settings = {setting.name: setting for setting in settings_of(SamplingArgs)}
    assert set(settings) <= set(SamplingParams.__struct_fields__)
    assert all(setting.help.endswith(".") for setting in settings.values())
    file = tmp_path / "c.yaml"
    file.write_text("top_k: 5\nmax_tokens: null\nstop: []\n")
    got = resolve("--config", str(file), "--temperature", "0", "--stop", "a", "--stop", "b")
    assert got["sampling"].given() == {"top_k": 5, "temperature": 0.0, "stop": ("a", "b")}
    assert resolve("--config", str(file))["sampling"].given() == {"top_k": 5}


def test_booleans_and_lists_from_all_sources(resolve, tmp_path: Path) -> None:
    assert not resolve("--no-enable-prefix-caching")["engine"].enable_prefix_caching
    env = {"QUIRE_ENABLE_PREFIX_CACHING": "false", "QUIRE_API_KEY": "a b"}
    got = resolve(env=env)
    assert not got["engine"].enable_prefix_caching
    assert got["server"].api_key == ("a", "b")
    assert resolve("--enable-prefix-caching", env=env)["engine"].enable_prefix_caching
    file = tmp_path / "c.yaml"
    file.write_text("enable-prefix-caching: false\napi-key: [x, y]\ngpu_memory_utilization: 1\n")
    got = resolve("--config", str(file))
    assert not got["engine"].enable_prefix_caching
    assert got["server"].api_key == ("x", "y")
    assert got["engine"].gpu_memory_utilization == 1.0
    assert resolve("--config", str(file), "--api-key", "z")["server"].api_key == ("z",)


def test_model_is_the_argument(resolve, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: from-file\n")
    assert resolve("some/model")["engine"].model == "some/model"
    assert resolve(env={"QUIRE_MODEL": "from-env"})["engine"].model == "from-env"
    assert resolve("--config", str(file))["engine"].model == "from-file"
    assert resolve("flag", "--config", str(file))["engine"].model == "flag"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown setting 'prot'. Did you mean 'port'?"),
        ("zzz: 1", "unknown setting 'zzz'."),
        ("1: 2", "unknown setting '1'"),
        ("port: '8000'", "port must be an integer, got '8000'"),
        ("port: true", "port must be an integer, got True"),
        ("port: 99999", "port must be in [0, 65535], got 99999"),
        ("port: null", "port must be an integer, got None"),
        ("enable_prefix_caching: 1", "enable_prefix_caching must be true or false, got 1"),
        ("load_format: pickle", "load_format must be one of auto, safetensors, dummy"),
        ("api_key: [1]", "api_key must be a text, got 1"),
        ("- port", "must map names to values"),
        ("port: [", "is not valid YAML"),
        ("block-size: 16\nblock_size: 32", "'block_size' is set twice"),
        ("port: 1\nport: 2", "'port' is set twice"),
        ("port: 2024-13-45", "is not valid YAML"),
        ("port: " + "[" * 5000, "is not valid YAML"),
        ("gpu_memory_utilization: 1" + "0" * 400, "gpu_memory_utilization must be a number"),
    ],
)
def test_file_errors_name_the_key(resolve, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve("--config", str(file))
    assert message in str(error.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_file(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1},
        {"max_body_mb": 0.0},
        {"max_body_mb": float("nan")},
        {"drain_timeout": float("inf")},
        {"api_key": ("",)},
        {"api_key": ("two words",)},
        {"log_level": "loud"},
    ],
)
def test_server_args_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        ServerArgs(**values)
    assert error.value.param == next(iter(values))


def test_the_example_file(resolve) -> None:
    file = Path(__file__).resolve().parents[2] / "examples" / "quire.yaml"
    got = resolve("--config", str(file))
    assert got["server"].served_model_name == ("assistant",)
    assert got["server"].request_timeout == 120.0
    assert got["engine"].max_num_seqs == 32
    # Commented-out lines are settings as well.
    commented = re.findall(r"^# (\w+): ", file.read_text(), re.MULTILINE)
    known = {setting.name for schema in SCHEMAS for setting in settings_of(schema)}
    assert commented
    assert set(commented) <= known


def test_a_setting_that_is_an_object(resolve, tmp_path: Path) -> None:
    """On the command line and in variables it is JSON, in the file it may be a mapping."""
    wanted = {"method": "suffix", "lookup_min": 3}
    file = tmp_path / "c.yaml"
    for text in (
        "speculative:\n  method: suffix\n  lookup_min: 3\n",
        f"speculative: '{json.dumps(wanted)}'\n",
    ):
        file.write_text(text)
        assert resolve("--config", str(file))["engine"].speculative == wanted
    assert resolve("--speculative", json.dumps(wanted))["engine"].speculative == wanted
    env = {"QUIRE_SPECULATIVE": json.dumps(wanted)}
    assert resolve(env=env)["engine"].speculative == wanted
    for wrong in ("suffix", "[1]", "{"):
        with pytest.raises(ConfigError, match="speculative"):
            resolve("--speculative", wrong)
    file.write_text("speculative: 3\n")
    with pytest.raises(ConfigError, match="speculative"):
        resolve("--config", str(file))
