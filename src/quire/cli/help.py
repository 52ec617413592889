"""The help of commands with many settings: those most people need, or all of them, by subject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

_SHOW_ALL = "quire.help_all"


@dataclass(frozen=True, slots=True)
class Subject:
    """A panel of the help.

    common: names of settings that `--help` shows. more: those that only `--help-all` shows.
    """

    title: str
    common: tuple[str, ...]
    more: tuple[str, ...] = ()


SUBJECTS = (
    Subject(
        "Model",
        ("model", "dtype", "quantization", "load_format", "max_model_len"),
        ("tokenizer", "revision", "seed", "pooling", "skip_tokenizer_init"),
    ),
    Subject("Address", ("host", "port"), ("uds", "root_path")),
    Subject(
        "Access",
        ("api_key", "api_key_file"),
        (
            "allowed_hosts", "public_metrics", "requests_per_minute", "tokens_per_minute",
            "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "cors_origins", "cors_methods",
            "cors_headers", "cors_credentials",
        ),
    ),
    Subject(
        "API",
        ("served_model_name", "tool_call_parser", "reasoning_parser"),
        (
            "generation_config", "chat_template", "trust_request_chat_template",
            "ignore_reasoning_effort", "max_body_mb", "max_body_memory_mb",
            "request_timeout",
            "response_store_size", "response_store_mb", "response_store_hours",
            "batch_dir", "batch_dir_gb", "batch_key_gb", "batch_file_mb", "batch_days",
            "structured_outputs_timeout", "structured_outputs_cache",
        ),
    ),
    Subject(
        "Device and memory",
        ("device", "gpu_memory_utilization", "kv_cache_gb", "kv_cache_dtype"),
        (
            "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "nnodes",
            "node_rank", "master_addr", "master_port", "distributed_executor",
            "redundant_experts", "async_tp",
            "num_kv_blocks", "block_size", "enable_prefix_caching", "host_cache_gb", "disk_cache",
            "disk_cache_gb",
        ),
    ),
    Subject(
        "Scheduling",
        ("max_num_seqs", "max_num_batched_tokens"),
        (
            "max_queue", "max_queue_tokens", "scheduling_policy", "priority_weight",
            "enable_chunked_prefill", "steps_in_flight",
        ),
    ),
    Subject("Speculative decoding", (), ("speculative", "speculative_model")),
    Subject("Kernels", ("enforce_eager",), ("deterministic", "disable")),
    Subject(
        "Processes",
        (),
        ("data_parallel_size", "api_workers", "engine_restarts", "drain_timeout"),
    ),
    Subject(
        "Prefill and decode apart",
        (),
        (
            "role", "peer", "peer_key", "kv_transfer", "transport", "lease_timeout", "kv_port",
            "remote_prefill_tokens",
        ),
    ),
    Subject(
        "Watching",
        ("access_log",),
        (
            "playground", "live_prompts", "log_level", "log_json", "log_prompts",
            "vllm_metrics", "otlp_endpoint", "trace_dir",
        ),
    ),
    Subject(
        "Sampling",
        ("max_tokens", "temperature", "top_p"),
        ("top_k", "min_p", "repetition_penalty", "stop"),
    ),
)  # fmt: skip
_OWN = "Options"
_REST = "Other settings"
_LAST = ("config", "help_all", "help")
"""Options that every command has."""


class SettingsCommand(TyperCommand):
    """A command made by `with_settings`: `--help` is short, `--help-all` is whole."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        full = bool(ctx.meta.get(_SHOW_ALL))
        console = Console(highlight=False)
        pieces = " ".join(self.collect_usage_pieces(ctx))
        console.print(f"Usage: {ctx.command_path} {pieces}", markup=False)
        console.print(f"\n{self.help or ''}\n", markup=False)
        for title, options in self._panels(ctx, full):
            console.print(Panel(_table(options), title=title, title_align="left"))
        if not full:
            console.print("--help-all shows every setting.", markup=False)
        console.print(
            "A setting is also a variable (--max-num-seqs: QUIRE_MAX_NUM_SEQS) and a key of the "
            "file (max_num_seqs). A flag wins over a variable, a variable over the file.",
            markup=False,
        )

    def _panels(self, ctx: Any, full: bool) -> Iterator[tuple[str, list[Any]]]:
        options = {option.name: option for option in self.get_params(ctx)}
        known = {name for subject in SUBJECTS for name in (*subject.common, *subject.more)}
        settings: frozenset[str] = getattr(self.callback, "settings", frozenset())
        own = [o for name, o in options.items() if name not in settings and name not in _LAST]
        if own:
            yield _OWN, own
        for subject in SUBJECTS:
            names = (*subject.common, *subject.more) if full else subject.common
            found = [options[name] for name in names if name in options and name in settings]
            if found:
                yield subject.title, found
        rest = [o for name, o in options.items() if name in settings and name not in known]
        if full and rest:
            yield _REST, rest
        yield "Help and files", [options[name] for name in _LAST if name in options]


def show_all(ctx: typer.Context, value: bool) -> None:
    """Prints the whole help and ends the command: the callback of `--help-all`."""
    if value:
        ctx.meta[_SHOW_ALL] = True
        ctx.get_help()
        raise typer.Exit


def _table(options: list[Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for option in options:
        table.add_row(Text(_names(option), style="bold"), Text(_help(option)))
    return table


def _names(option: Any) -> str:
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper())
    flags = sorted(option.opts, key=len, reverse=True)
    if option.is_flag:
        (long, *short) = flags
        name = f"--[no-]{long[2:]}" if option.secondary_opts else long
        return ", ".join((name, *short))
    return f"{', '.join(flags)} {option.metavar or 'VALUE'}"


def _help(option: Any) -> str:
    """Returns the text; a setting's already ends in its default."""
    text = str(option.help or "")
    if option.param_type_name == "argument" or option.is_flag:
        return text
    default = option.default
    if default is None or "[default" in text:
        return text
    return f"{text} [default: {default}]"
