"""Settings of an engine.

`EngineArgs` is the schema of keyword arguments, flags, QUIRE_* variables and the YAML file.
`EngineConfig` is what it resolves to once model and device are known.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from quire.errors import ConfigError

OPTIMIZATIONS = ("graphs", "overlap", "fusions", "skinny", "pdl", "symmetric")
"""The values of `EngineArgs.disable`.

graphs: CUDA graphs.
overlap: launching a step before the results of the last one are read.
fusions: norms, activations and residuals inside linear layers.
skinny: Quire's kernels for linear layers of few rows.
pdl: programmatic dependent launch.
symmetric: Quire's kernels for sums over ranks.
"""


KV_CACHE_DTYPES = (
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_dynamic", "int8"
)  # fmt: skip
"""The values of `EngineArgs.kv_cache_dtype`. fp8 is fp8_e4m3."""


QUANTIZATIONS = ("float", "fp8", "int4", "int8", "w8a8", "w8a8_fp8", "head=fp8", "head=int8")
"""The values of `EngineArgs.quantization`: one for layers, one for the head, or both."""


_COUNTS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "max_queue",
    "max_queue_tokens", "steps_in_flight", "tensor_parallel_size", "structured_outputs_cache",
    "max_loras", "max_lora_rank", "pipeline_parallel_size", "nnodes",
)  # fmt: skip
_SIZES = (
    "priority_weight", "host_cache_gb", "disk_cache_gb", "structured_outputs_memory_mb",
)  # fmt: skip


_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (lambda size: size > 0 and not size & (size - 1), "a power of two"),
    "gpu_memory_utilization": (lambda share: 0.0 < share <= 1.0, "in (0, 1]"),
    "kv_cache_gb": (lambda size: size > 0.0, "> 0"),
    "structured_outputs_drafts": (lambda count: 0 <= count <= 16, "from 0 to 16"),
    "structured_outputs_wait_us": (lambda us: 0.0 <= us <= 1e6, "in [0, 1000000]"),
    "structured_outputs_timeout": (lambda seconds: 0.0 < seconds <= 3600.0, "in (0, 3600]"),
    **dict.fromkeys(_COUNTS, (lambda count: count > 0, "at least 1")),
    **dict.fromkeys(_SIZES, (lambda size: size >= 0.0, ">= 0")),
}
"""Limits of settings that are not None: a check, and its wording in errors."""

_SPELLINGS = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32",
}  # fmt: skip
"""Other names of dtypes, which errors translate."""


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """An engine's settings, as users give them. None: chosen from the model and the device."""

    model: str | None = _setting(
        None, "Model folder or hub id. Left out: the embedded model.", argument=True
    )
    tokenizer: str | None = _setting(None, "Tokenizer folder or hub id, if not the model's.")
    revision: str | None = _setting(None, "Hub revision of the model (branch, tag or commit).")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = _setting(
        "auto", "auto, float32, float16 or bfloat16. auto: the checkpoint's on a GPU, fp32 on CPU."
    )
    quantization: str | None = _setting(
        None,
        "How linear layers store weights, rounded when read. fp8, int8: 8 bits and a scale per "
        "output. int4: 4 bits and scales of 128 inputs. w8a8, w8a8_fp8: int8 or fp8, inputs too. "
        "float: those of a GGUF file as floats. The head too: int4,head=int8. Default: as stored.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _setting(
        "auto", "dummy gives random weights for a folder that holds only config.json."
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N.")
    seed: int = _setting(0, "Seed of the engine: of dummy weights and of requests without one.")
    max_model_len: int | None = _setting(None, "Longest sequence, prompt and output together.")
    max_num_seqs: int | None = _setting(
        None, "Most requests in one step. Default: 256 on a GPU, 64 on CPU."
    )
    max_num_batched_tokens: int | None = _setting(
        None, "Most tokens in one step. Default: 8192 on a GPU, 2048 on CPU, fewer in stages."
    )
    gpu_memory_utilization: float = _setting(0.9, "Share of the GPU's memory Quire may use.")
    block_size: int = _setting(16, "Tokens per KV block.")
    num_kv_blocks: int | None = _setting(None, "KV blocks to allocate, instead of measuring.")
    kv_cache_gb: float | None = _setting(
        None, "Memory for the KV cache in GB, instead of measuring. Default on CPU: 4, or less."
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "How KV is stored. auto: in dtype. fp8: e4m3 with the checkpoint's scales per head, or 1; "
        "fp8_dynamic, int8: with a scale per token and head.",
    )
    enable_prefix_caching: bool = _setting(True, "Reuse KV blocks of equal prefixes.")
    host_cache_gb: float = _setting(
        0.0, "Host memory, in GB, for KV blocks that the device has no room to keep."
    )
    disk_cache: str | None = _setting(
        None, "Folder for KV blocks that the host has no room to keep; survives restarts."
    )
    disk_cache_gb: float = _setting(32.0, "Most that the disk cache's folder may hold, in GB.")
    kv_peers: Mapping[str, Any] | None = _setting(None, "See `DisaggSettings`.", internal=True)
    enable_lora: bool = _setting(False, "Take LoRA adapters; so do lora and lora_dir.")
    lora: tuple[str, ...] = _setting((), "LoRA adapter to serve, NAME=PATH (may be repeated).")
    lora_dir: str | None = _setting(None, "Folder of LoRA adapters, named by their own folders.")
    max_loras: int = _setting(8, "Most LoRA adapters that the device holds.")
    max_lora_rank: int = _setting(16, "Largest rank of LoRA adapters, up to 256.")
    lora_cache_gb: float = _setting(4.0, "Host memory, in GB, for LoRA adapters that were read.")
    enable_chunked_prefill: bool = _setting(True, "Split long prompts over steps, beside decodes.")
    speculative: Mapping[str, Any] | None = _setting(
        None, "Speculative decoding, as JSON: see docs/speculation.md for its keys."
    )
    speculative_model: str | None = _setting(
        None, "Draft model or EAGLE-3 head, folder or hub id: short for speculative's key model."
    )
    scheduling_policy: Literal["fcfs", "priority"] = _setting(
        "fcfs", "Queue order: arrival, or priority with ageing (lower runs first)."
    )
    priority_weight: float = _setting(
        10.0, "Ageing: one unit of priority is worth this many seconds of waiting."
    )
    max_queue: int | None = _setting(
        None,
        "Most requests that may wait; more are refused with 503, unless their key has less than "
        "its share of the queue. Default: no limit.",
    )
    max_queue_tokens: int | None = _setting(None, "Most prompt tokens that may wait, as max_queue.")
    steps_in_flight: int | None = _setting(
        None, "Steps launched before the oldest is read. Default: 2 on a GPU, 1 on CPU."
    )
    enforce_eager: bool = _setting(
        False, "Launch kernels one by one instead of as CUDA graphs (slower; no capture at start)."
    )
    tune_tables: Literal["auto", "on", "off"] = _setting(
        "auto", "Measure plans of linear layers that tables lack, while idle. auto: in servers."
    )
    pooling: Literal["auto", "last", "mean"] = _setting(
        "auto",
        "Embeddings: the last token's hidden state, or the mean over all. auto: as the model's "
        "1_Pooling/config.json says, else last.",
    )
    structured_outputs_timeout: float = _setting(5.0, "Seconds to compile a schema or grammar in.")
    structured_outputs_wait_us: float = _setting(
        30.0,
        "Microseconds that a step waits for late masks. Rows whose masks are later still sit the "
        "step out.",
    )
    structured_outputs_memory_mb: float = _setting(
        64.0,
        "MB of the host's memory for masks of schemas that come again; 0: keep none.",
    )
    structured_outputs_drafts: int | None = _setting(
        None,
        "Most tokens of a text that a schema forces to compute at once, up to 16. Default: 7 on a "
        "GPU, 0 for models with recurrent layers, in stages and with --enforce-eager.",
    )
    structured_outputs_cache: int = _setting(128, "Compiled schemas and grammars to keep.")
    deterministic: bool = _setting(
        False,
        "Make results depend on the request alone, to the bit: not on the batch, on chunking, "
        "preemption, prefix hits or the number of ranks. Slower.",
    )
    disable: tuple[str, ...] = _setting(
        (), f"Optimization to switch off, to measure its worth: {', '.join(OPTIMIZATIONS)}."
    )
    tensor_parallel_size: int = _setting(1, "GPUs that share each layer.")
    pipeline_parallel_size: int = _setting(1, "Layers' stages, each on tensor_parallel_size GPUs.")
    nnodes: int = _setting(1, "Machines, each with as many whole stages.")
    node_rank: int = _setting(0, "This machine's number; on 0 the engine runs, others wait for it.")
    master_addr: str = _setting("127.0.0.1", "Address of machine 0.")
    master_port: int = _setting(29600, "Port there for other machines; the next one is used, too.")
    distributed_executor: Literal["process", "ray"] = _setting(
        "process", "Who places ranks: each machine its own, or Ray, which finds the machines."
    )
    async_tp: Literal["auto", "on", "off"] = _setting(
        "off", "Long prompts as two halves, one's sums over ranks beside the other's products."
    )
    enable_expert_parallel: bool = _setting(False, "Ranks hold whole experts, not parts of all.")
    redundant_experts: int = _setting(0, "Further copies of experts that many tokens choose.")
    trace_dir: str | None = _setting(
        None, "Folder for a trace of every step, for Perfetto (256 MB at most; slows it a little)."
    )
    skip_tokenizer_init: bool = _setting(False, "Serve token ids only; load no tokenizer.")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kind))
            if get_origin(kind) is Literal:
                _one_of(name, getattr(self, name), get_args(kind))
        for name, (fine, wanted) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not fine(value):
                raise ConfigError(f"{name} must be {wanted}, got {value}", name)
        self._check_tiers()
        for name in self.disable:
            _one_of("disable", name, OPTIMIZATIONS)
        for part in () if self.quantization is None else self.quantization.split(","):
            _one_of("quantization", part, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    def _check_tiers(self) -> None:
        if self.host_cache_gb and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_cache_gb={self.host_cache_gb:g} needs enable_prefix_caching", "host_cache_gb"
            )
        if self.disk_cache is not None and not self.host_cache_gb:
            raise ConfigError(
                "disk_cache needs host_cache_gb > 0: blocks travel through the host's memory",
                "disk_cache",
            )
        if self.disk_cache is not None and not self.disk_cache_gb:
            raise ConfigError(
                f"disk_cache needs disk_cache_gb > 0, got {self.disk_cache_gb:g}", "disk_cache_gb"
            )

    @property
    def ranks(self) -> int:
        """Number of devices that the engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def parallel(self) -> bool:
        """Whether any setting of several ranks or machines is used."""
        sizes = self.ranks, self.nnodes, self.node_rank + 1, self.redundant_experts + 1
        others = self.distributed_executor != "process" or self.async_tp == "on"
        return self.enable_expert_parallel or others or max(sizes) > 1

    @property
    def speculates(self) -> bool:
        """Whether the settings ask for speculative decoding."""
        return self.speculative is not None or self.speculative_model is not None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Builds settings by name.

        Raises:
            ConfigError: a name is unknown, or a value is wrong.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in kwargs:
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r}; known are: {', '.join(sorted(known))}", name
                )
        return cls(**kwargs)


def _checked(name: str, value: Any, kind: Any) -> Any:
    """Returns a setting's value in its type: paths become strings, and lists tuples.

    Raises:
        ConfigError: its type is wrong, or the number is infinite or too large.
    """
    bound = 2**63 if name == "seed" else 2**31
    try:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = msgspec.convert(value, str if get_origin(kind) is Literal else kind)
    except (msgspec.ValidationError, TypeError):
        wanted = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{name} must be {wanted}, got {value!r}", name) from None
    if isinstance(value, int | float) and not -bound <= value < bound:
        wanted = "an integer" if isinstance(value, int) else "finite,"
        raise ConfigError(f"{name} must be {wanted} in [{-bound}, {bound}), got {value}", name)
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        better = _SPELLINGS.get(value)
        hint = f"; use {better}" if better in allowed else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}", name)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The settings of the scheduler and the cache; see `EngineArgs`.

    Attributes:
        pipeline_depth: steps from the one that plans a generating request's token to the first one
            that may plan its next: the number of the pipeline's stages.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    steps_in_flight: int = 1
    pipeline_depth: int = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_weight: float = 10.0
    max_queue: int | None = None
    max_queue_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings, resolved against the model and the device.

    Attributes:
        kv_cache_dtype: the dtype of stored keys and values: `dtype`, a format of 8 bits, or auto
            for `dtype`.
        pooling: how embeddings are pooled.
        matryoshka: sizes that embeddings may be shortened to; () for any, None for no other size.
    """

    args: EngineArgs
    model_path: str
    tokenizer_path: str | None
    model_name: str
    device: str
    dtype: str
    block_size: int
    scheduler: SchedulerConfig
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    kv_cache_dtype: str = "auto"
    hidden_size: int = 0
    pooling: Literal["last", "mean"] = "last"
    matryoshka: tuple[int, ...] | None = None

    @property
    def eager(self) -> bool:
        """Whether kernels are launched one by one."""
        return self.args.enforce_eager or "graphs" in self.args.disable
