"""Settings of the HTTP server. `quire.config.EngineArgs` has the engine's."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from quire.config import setting
from quire.errors import ConfigError, installing, require_nixl
from quire.http_client import HttpClient, split_url

_address_setting = partial(setting, subject="Address")
_access_setting = partial(setting, subject="Access")
_api_setting = partial(setting, subject="API")
_process_setting = partial(setting, subject="Processes")
_peer_setting = partial(setting, subject="Prefill and decode apart")
_watching_setting = partial(setting, subject="Watching")


def check_secret(secret: str) -> bool:
    """Tells whether an API key can be sent in a header without encoding."""
    return bool(secret) and secret.isascii() and secret.isprintable() and " " not in secret


def check_body_memory(body_mb: float, memory_mb: float) -> None:
    """Checks that the memory for all bodies is finite and large enough for the largest one.

    Args:
        body_mb: largest body, in MB.
        memory_mb: memory for all bodies, in MB.

    Raises:
        ConfigError: it is not.
    """
    if not (math.isfinite(memory_mb) and memory_mb >= body_mb):
        raise ConfigError(
            f"max_body_memory_mb={memory_mb:g} must be at least max_body_mb={body_mb:g}",
            "max_body_memory_mb",
        )


def check_endpoint(endpoint: str) -> None:
    """Checks the URL of an OpenTelemetry collector, and that OpenTelemetry is installed.

    Raises:
        ConfigError: either is not so.
    """
    try:
        # `split_url` would add a missing "http://", which the exporter would not do.
        split_url(endpoint if "//" in endpoint else f"//{endpoint}", "otlp_endpoint")
    except ConfigError:
        raise ConfigError(
            f"otlp_endpoint must be a URL as in 'http://localhost:4318', got {endpoint!r}",
            "otlp_endpoint",
        ) from None
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(package):
            raise ConfigError(
                f"otlp_endpoint needs the package {package}; {installing('otel')}",
                "otlp_endpoint",
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The parent package is missing too.
        return False


@dataclass(frozen=True, kw_only=True)
class ApiArgs:
    """Settings of how requests are read and answered."""

    served_model_name: tuple[str, ...] = _api_setting(
        (),
        "Name of the model in the API, or a pattern as claude-* (may be repeated). Default: its "
        "hub id, or its folder's name.",
        common=True,
    )
    tool_call_parser: Literal[
        "auto", "none", "apertus", "apriel", "command", "command_r", "deepseek_v3", "deepseek_v31",
        "deepseek_v32", "deepseek_v4", "functionary", "functionary_v32", "functiongemma", "gemma4",
        "gigachat3", "gigachat31", "glm45", "gpt_oss", "granite", "hermes", "hunyuan", "kimi_k2",
        "kimi_k3", "lfm2", "llama3_json", "minicpm5", "minimax_m1", "minimax_m2", "minimax_m3",
        "mistral", "nemotron", "phi4_mini", "pythonic", "qwen3_xml", "seed_oss", "solar",
    ] = _api_setting(
        "auto",
        "Format of the model's tool calls. auto: detected from its chat template.",
        common=True,
    )  # fmt: skip
    reasoning_parser: Literal[
        "auto", "none", "apertus", "apriel", "command", "deepseek_r1", "gemma4", "gpt_oss",
        "hunyuan", "kimi_k3", "minimax_m3", "mistral", "qwen3", "seed_oss", "solar",
    ] = _api_setting(
        "auto",
        "Format of the model's reasoning. auto: detected from its chat template.",
        common=True,
    )  # fmt: skip
    generation_config: Literal["auto", "none"] = _api_setting(
        "auto", "auto: requests default to the sampling settings the model ships with."
    )
    chat_template: str | None = _api_setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )
    trust_request_chat_template: bool = _api_setting(
        False, "Accept requests with their own chat template (chat_template)."
    )
    ignore_reasoning_effort: bool = _api_setting(
        False,
        "Ignore reasoning_effort where the chat template does not use it, instead of refusing it.",
    )
    strict_fields: bool = _api_setting(
        False, "Refuse hints (fields that an answer can do without) instead of ignoring them."
    )
    max_body_mb: float = _api_setting(16.0, "Largest request body, in MB.")
    max_body_memory_mb: float = _api_setting(
        256.0,
        "Memory for the bodies of all requests while they arrive, in MB, in each of --api-workers; "
        "requests above it get 503.",
    )

    def __post_init__(self) -> None:
        self._positive("max_body_mb")
        check_body_memory(self.max_body_mb, self.max_body_memory_mb)
        if any(not name for name in self.served_model_name):
            raise ConfigError("served_model_name: a name is empty", "served_model_name")
        self._one_of("generation_config", "tool_call_parser", "reasoning_parser")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"chat_template: no file {self.chat_template!r}", "chat_template")

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"{name} must be > 0, got {value}", name)

    def _one_of(self, *names: str) -> None:
        hints = get_type_hints(type(self))
        for name in names:
            allowed = get_args(hints[name])
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}", name
                )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1e6)

    @property
    def max_body_memory_bytes(self) -> int:
        return int(self.max_body_memory_mb * 1e6)


@dataclass(frozen=True, kw_only=True)
class ServerArgs(ApiArgs):
    """Settings of the HTTP server."""

    host: str = _address_setting(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0 is every interface: then set --api-key too.",
        common=True,
    )
    port: int = _address_setting(8000, "Port to listen on; 0 takes a free one.", common=True)
    ollama_api: int | None = setting(
        None,
        "Answer Ollama's API (/api/chat and so on) too, and listen on this port for it; Ollama's "
        "own is 11434.",
    )
    uds: str | None = _address_setting(None, "Unix socket to listen on, instead of host and port.")
    root_path: str = _address_setting(
        "", "Path under which a proxy publishes the server, as in /llm."
    )
    api_key: tuple[str, ...] = _access_setting(
        (),
        "Accept this bearer key (may be repeated). Every route except /health, /ping, /ready and "
        "the playground's page then needs one.",
        common=True,
    )
    api_key_file: str | None = _access_setting(
        None, "TOML file of named keys with their own limits; read again on SIGHUP.", common=True
    )
    allowed_hosts: tuple[str, ...] = _access_setting(
        (),
        "Name under which clients reach the server (may be repeated; * is any): requests for other "
        "names are refused. Default: on a loopback address without keys localhost, else any. "
        "Addresses are always allowed.",
    )
    public_metrics: bool = _access_setting(False, "Answer /metrics without a key.")
    requests_per_minute: int | None = _access_setting(
        None, "Requests per minute that each key may make. Default: no limit."
    )
    tokens_per_minute: int | None = _access_setting(
        None,
        "Prompt and output tokens per minute that each key may use. Default: no limit.",
    )
    ssl_certfile: str | None = _access_setting(
        None, "Certificate chain (PEM); with it and its key the server speaks HTTPS."
    )
    ssl_keyfile: str | None = _access_setting(None, "Key of the certificate (PEM).")
    ssl_ca_certs: str | None = _access_setting(
        None, "CA certificates (PEM): clients must then show a certificate signed by one of them."
    )
    cors_origins: tuple[str, ...] = _access_setting(
        (), "Allow requests from pages of this origin (may be repeated; * is any). Default: none."
    )
    cors_methods: tuple[str, ...] = _access_setting(("*",), "Methods that such pages may use.")
    cors_headers: tuple[str, ...] = _access_setting(("*",), "Headers that such pages may send.")
    cors_credentials: bool = _access_setting(
        False, "Allow such pages to send cookies and credentials."
    )
    request_timeout: float | None = _api_setting(
        None, "Seconds after which a request ends with 504. Default: no limit."
    )
    response_store_size: int = _api_setting(
        1000,
        "Stored responses to keep, and as many stored chat completions; 0 keeps none.",
    )
    response_store_mb: float = _api_setting(
        256.0, "Memory for stored responses, in MB, and as much for stored chat completions."
    )
    response_store_hours: float = _api_setting(
        24.0, "Hours after which stored responses and chat completions are removed."
    )
    batch_dir: str | None = _api_setting(
        None,
        "Folder of /v1/files and /v1/batches. Batches continue after a restart. Default: the "
        "server has neither route.",
    )
    batch_dir_gb: float = _api_setting(10.0, "Most GB of files in --batch-dir.")
    batch_key_gb: float | None = _api_setting(
        None,
        "Most GB of one API key's files in --batch-dir. Default: half of it with several keys.",
    )
    batch_file_mb: float = _api_setting(200.0, "Largest uploaded file, in MB.")
    batch_days: float = _api_setting(30.0, "Days after which files and ended batches are removed.")
    data_parallel_size: int = _process_setting(
        1,
        "Engines behind the port, each on its own GPUs. A request goes to an engine that has its "
        "prompt's beginning in the cache, or to one with less work.",
    )
    api_workers: int = _process_setting(
        1,
        "API processes that share the port. With several, responses and chats are not stored.",
    )
    engine_restarts: int = _process_setting(
        3,
        "Most restarts of an engine that dies, with growing pauses. The count starts again once "
        "the engine has run for a minute.",
    )
    drain_timeout: float = _process_setting(
        30.0, "Seconds that running requests get to finish after a signal to stop."
    )
    stuck_timeout: float | None = setting(
        None,
        "Seconds without a turn of the engine's loop after which the engine is restarted. Default: "
        "20, or 300 on a CPU, where a step may take long.",
    )
    role: Literal["prefill", "decode", "both"] = _peer_setting(
        "both",
        "prefill: computes prompts for other servers. decode: lets its peers compute long prompts. "
        "both: does both if it has peers.",
    )
    peer: tuple[str, ...] = _peer_setting(
        (), "URL of a server that computes prompts for this one (may be repeated)."
    )
    peer_key: str | None = _peer_setting(None, "API key for requests to the peers.")
    kv_transfer: Literal["sync", "async"] = _peer_setting(
        "sync",
        "sync: sends a prompt's KV when the whole prompt is computed. async: sends each step's KV "
        "after the step.",
    )
    transport: Literal["tcp", "nixl", "ipc"] = _peer_setting(
        "tcp",
        "How KV is transferred. tcp: TCP connections, or shared memory between servers of one "
        "host. nixl: ranks read the cache of the peer's ranks (needs the extra `nixl`). ipc: the "
        "same between GPUs of one host, with CUDA only.",
    )
    lease_timeout: float = _peer_setting(
        10.0, "Seconds without a message from a peer after which it counts as dead."
    )
    kv_port: int = _peer_setting(0, "Port from which peers fetch KV; 0 takes a free one.")
    remote_prefill_tokens: int | None = _peer_setting(
        None,
        "Fewest uncached prompt tokens for which a peer computes the prompt. Default: as many as "
        "fill a step.",
    )
    access_log: bool = _watching_setting(
        False, "Log every request, without its content.", common=True
    )
    playground: bool = _watching_setting(
        True, "Serve a page at / to chat with the model, and /engine/live to watch the engine."
    )
    live_prompts: bool = _watching_setting(
        False, "Show the text of cached prompts in /engine/live."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _watching_setting(
        "info", "Log level."
    )
    log_json: bool = _watching_setting(False, "Log one JSON object per line.")
    log_prompts: bool = _watching_setting(False, "Log every request with its prompts.")
    vllm_metrics: bool = _watching_setting(
        False, "Show the metrics under vLLM's names too, for dashboards made for vLLM."
    )
    otlp_endpoint: str | None = _watching_setting(
        None,
        "Collector for OpenTelemetry traces of requests, as in http://localhost:4318 (OTLP over "
        "HTTP; needs the extra `otel`).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ports()
        if self.response_store_size < 0:
            raise ConfigError(
                f"response_store_size must be >= 0, got {self.response_store_size}",
                "response_store_size",
            )
        self._positive("drain_timeout")
        if self.stuck_timeout is not None:
            self._positive("stuck_timeout")
        self._positive("response_store_mb", "response_store_hours")
        self._positive("batch_dir_gb", "batch_file_mb", "batch_days")
        if self.batch_key_gb is not None:
            self._positive("batch_key_gb")
        for name, least, most in (
            ("engine_restarts", 0, 1000),
            ("api_workers", 1, 64),
            ("data_parallel_size", 1, 64),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} must be in [{least}, {most}], got {getattr(self, name)}", name
                )
        self._check_peers()
        if self.api_workers > 1:
            if self.batch_dir is not None:
                raise ConfigError("batch_dir needs api_workers=1", "batch_dir")
            object.__setattr__(self, "response_store_size", 0)
        self._one_of("log_level")
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}", name)
        if self.request_timeout is not None:
            self._positive("request_timeout")
        if not all(check_secret(key) for key in self.api_key):
            raise ConfigError("an api_key must be printable ASCII without spaces", "api_key")
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        self._check_listening()

    def _check_ports(self) -> None:
        for name in ("port", "ollama_api"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} must be in [0, 65535], got {port}", name)
        if self.ollama_api and self.ollama_api == self.port and self.uds is None:
            raise ConfigError(
                f"ollama_api={self.ollama_api} is also --port, which answers Ollama's API "
                "anyway; choose another port for one of them",
                "ollama_api",
            )

    def _check_peers(self) -> None:
        self._one_of("role", "kv_transfer", "transport")
        if self.transport == "nixl":
            require_nixl()
        self._positive("lease_timeout")
        if not 0 <= self.kv_port <= 65535:
            raise ConfigError(f"kv_port must be in [0, 65535], got {self.kv_port}", "kv_port")
        if self.kv_port and self.kv_port == self.port and self.uds is None:
            raise ConfigError(f"kv_port={self.kv_port} is also the API's port", "kv_port")
        if self.remote_prefill_tokens is not None and self.remote_prefill_tokens < 1:
            raise ConfigError(
                f"remote_prefill_tokens must be at least 1, got {self.remote_prefill_tokens}",
                "remote_prefill_tokens",
            )
        if self.role == "prefill" and self.peer:
            raise ConfigError(f"role=prefill uses no peers, got peer={self.peer[0]!r}", "peer")
        if self.role != "decode" and self.kv_peers is not None and self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} needs role=decode or no peers: a "
                "server that computes prompts for others has one engine; start several servers",
                "data_parallel_size",
            )
        if self.kv_peers is None:
            for name in ("peer_key", "kv_transfer", "transport", "remote_prefill_tokens"):
                if getattr(self, name) != getattr(ServerArgs, name):
                    raise ConfigError(
                        f"{name} only applies to servers with peers: set peer, or role=prefill or "
                        "decode",
                        name,
                    )
        for url in self.peer:
            try:
                HttpClient(url)
            except ConfigError as error:
                raise ConfigError(f"peer: {error}", "peer") from None

    @property
    def kv_peers(self) -> dict[str, Any] | None:
        """The engine's settings for disaggregation (`DisaggSettings`); None without peers."""
        if self.role == "both" and not self.peer:
            return None
        return {
            "role": self.role,
            "peers": self.peer,
            "peer_key": self.peer_key,
            "kv_transfer": self.kv_transfer,
            "transport": self.transport,
            "lease_timeout": self.lease_timeout,
            "remote_prefill_tokens": self.remote_prefill_tokens,
            "host": self.host if self.uds is None else "127.0.0.1",
            "port": self.kv_port,
        }

    def _check_listening(self) -> None:
        root = self.root_path
        if root and (not root.startswith("/") or root.endswith("/")):
            raise ConfigError(f"root_path must be as in '/llm', got {root!r}", "root_path")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            file = getattr(self, name)
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"{name}: no file {file!r}", name)
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs ssl_certfile", name)
        if not self.cors_origins and (
            self.cors_methods != ("*",) or self.cors_headers != ("*",) or self.cors_credentials
        ):
            raise ConfigError("cors settings need cors_origins", "cors_origins")
