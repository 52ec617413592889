"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: what Ollama's clients ask of models."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.ollama.convert import model_name
from quire.server.apis.ollama.protocol import OllamaShowRequest
from quire.server.apis.openai.fim import markers_of
from quire.server.context.request_context import context_of
from quire.server.http.bodies import read_any_body
from quire.server.http.sse import json_response
from quire.server.state import ServerState, state_of
from quire.system import read_bounded

VERSION = "0.13.0"
"""Version of Ollama whose API these routes follow. Clients require a least version."""
_NEVER = "2318-01-01T00:00:00Z"
"""The time at which Ollama unloads a model that stays loaded."""


class ModelDetails(msgspec.Struct):
    """parameter_size: as in "8.0B"; "" if it is not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(msgspec.Struct):
    """A model. size: bytes of its files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class TagList(msgspec.Struct):
    models: list[TaggedModel]


class RunningModel(msgspec.Struct):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(msgspec.Struct):
    models: list[RunningModel]


class ShownModel(msgspec.Struct):
    """Answer of `/api/show`. `modelfile` is empty, because there is none."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionAnswer(msgspec.Struct):
    version: str


async def version(request: Request) -> Response:
    return json_response(VersionAnswer(VERSION))


async def tags(request: Request) -> Response:
    state = state_of(request)
    files = ModelFiles(state)
    return json_response(
        TagList(
            [
                TaggedModel(
                    name, name, files.modified, files.size, files.digest(name), files.details(name)
                )
                for name in _names(request, state)
            ]
        )
    )


async def loaded_models(request: Request) -> Response:
    state = state_of(request)
    files = ModelFiles(state)
    on_gpu = not state.client.config.device.startswith("cpu")
    longest = state.client.config.scheduler.max_model_len
    models = [
        RunningModel(
            name, name, files.size, files.digest(name), files.details(name), _NEVER,
            files.size if on_gpu else 0, longest,
        )
        for name in ([] if state.client.asleep else _names(request, state))
    ]  # fmt: skip
    return json_response(RunningList(models))


async def show(request: Request) -> Response:
    state = state_of(request)
    body = await read_any_body(request, OllamaShowRequest, state.args.max_body_bytes)
    name = model_name(body.named, state)
    state.check_model(name, context_of(request))
    files = ModelFiles(state)
    tokenizer = state.client.tokenizer
    shown = files.details(name)
    info: dict[str, Any] = {
        "general.architecture": shown.family,
        f"{shown.family}.context_length": state.client.config.scheduler.max_model_len,
        f"{shown.family}.embedding_length": state.client.config.hidden_size,
    }
    template = tokenizer.chat_templates.get("default", "") if tokenizer is not None else ""
    defaults = "\n".join(f"{key} {value}" for key, value in state.defaults.items())
    return json_response(
        ShownModel("", defaults, template, shown, info, _capabilities(state), files.modified)
    )


def _names(request: Request, state: ServerState) -> list[str]:
    """Returns the models that the request's key may use. Patterns are no names."""
    key = context_of(request).key
    names = [name for name in state.model_names if "*" not in name]
    return [
        name
        for name in [*names, *state.further_models]
        if key.may_use(state.model_name if state.is_served(name) else name)
    ]


def _capabilities(state: ServerState) -> list[str]:
    if state.client.config.encoder:
        return ["embedding"]
    found = ["completion"]
    if state.client.config.images:
        found.append("vision")
    if state.chat_format.tool_parser is not None:
        found.append("tools")
    if state.chat_format.reasoning is not None:
        found.append("thinking")
    tokenizer = state.client.tokenizer
    if tokenizer is not None and markers_of(tokenizer) is not None:
        found.append("insert")
    return found


class ModelFiles:
    """Facts about the served model's files.

    Attributes:
        size: bytes of the weights' files; 0 if there are none.
        modified: time of their last change.
    """

    def __init__(self, state: ServerState) -> None:
        config = state.client.config
        self._state = state
        self._path = Path(config.model_path)
        self.is_gguf = self._path.suffix == ".gguf"
        weights = [self._path] if self.is_gguf else [*self._path.glob("*.safetensors")]
        found = [os.stat(file) for file in weights if file.is_file()]
        self.size = sum(file.st_size for file in found)
        changed = max((file.st_mtime for file in found), default=float(state.created))
        self.modified = datetime.fromtimestamp(changed, UTC).isoformat().replace("+00:00", "Z")
        self._settings = self._read_settings()

    def _read_settings(self) -> dict[str, Any]:
        try:
            raw = json.loads(read_bounded(self._path / "config.json"))
        except (OSError, ValueError):
            return {}
        return raw if isinstance(raw, dict) else {}

    def details(self, name: str) -> ModelDetails:
        """Returns what is known of a model. An adapter's parent is the served model."""
        family = str(self._settings.get("model_type") or "unknown")
        quantization = self._settings.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        level = str(method or self._state.client.config.dtype).upper()
        parent = "" if self._state.is_served(name) else self._state.model_name
        return ModelDetails(
            parent, "gguf" if self.is_gguf else "safetensors", family, [family], "", level
        )

    def digest(self, name: str) -> str:
        """Returns a hash that changes with the model, its settings and its name."""
        return hashlib.sha256(f"{self._state.fingerprint} {name}".encode()).hexdigest()
