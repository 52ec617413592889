"""Settings of an engine.

`EngineArgs` is the schema of keyword arguments, flags, QUIRE_* variables and the YAML file.
`EngineConfig` is what it resolves to once model and device are known.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits a setting that is not None.

    Attributes:
        allows: whether a value is allowed.
        wording: what errors say that it must be.
    """

    allows: Callable[[Any], bool]
    wording: str


COUNT = Limit(lambda count: count > 0, "at least 1")
SIZE = Limit(lambda size: size >= 0.0, ">= 0")
POSITIVE = Limit(lambda size: size > 0.0, "> 0")
SHARE = Limit(lambda share: 0.0 < share <= 1.0, "in (0, 1]")
POWER_OF_TWO = Limit(lambda size: size > 0 and not size & (size - 1), "a power of two")


_SPELLINGS = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32",
}  # fmt: skip
"""Other names of dtypes, which errors translate."""


def setting(default: Any, help: str, *, limit: Limit | None = None, **metadata: Any) -> Any:
    """Declares a setting: a field of a class of settings.

    Args:
        default: its value where users give none.
        help: the text of the flag's help.
        limit: what its values must be.
        metadata: `argument=True` makes it positional. `internal=True` leaves it to keywords: it has
            no flag, no variable and no YAML key. `secret=True` hides it in `/server_info`.
            `one_engine=True` refuses values of it with several engines (`data_parallel_size`).
            `subject` is the panel of the help that shows it: in `--help` with `common=True`, else
            only in `--help-all`. A panel has its common settings first, each part in the order of
            their declaration.
    """
    return field(default=default, metadata={"help": help, "limit": limit, **metadata})


_model_setting = partial(setting, subject="Model")
_device_setting = partial(setting, subject="Device and memory")
_scheduling_setting = partial(setting, subject="Scheduling")
_kernel_setting = partial(setting, subject="Kernels")


@dataclass(frozen=True, kw_only=True)
class CoreArgs:
    """The settings of an engine without features. None: chosen from the model and the device."""

    model: str | None = _model_setting(
        None, "Model folder or hub id. Left out: the embedded model.", argument=True, common=True
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = _model_setting(
        "auto",
        "auto, float32, float16 or bfloat16. auto: the checkpoint's on a GPU, fp32 on CPU.",
        common=True,
    )
    quantization: str | None = _model_setting(
        None,
        "How linear layers store weights, rounded when read. fp8, int8: 8 bits and a scale per "
        "output. int4: 4 bits and scales of 128 inputs. w8a8, w8a8_fp8: int8 or fp8, inputs too. "
        "float: those of a GGUF file as floats. The head too: int4,head=int8. Default: as stored.",
        common=True,
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _model_setting(
        "auto", "dummy gives random weights for a folder that holds only config.json.", common=True
    )
    max_model_len: int | None = _model_setting(
        None, "Longest sequence, prompt and output together.", limit=COUNT, common=True
    )
    tokenizer: str | None = _model_setting(None, "Tokenizer folder or hub id, if not the model's.")
    revision: str | None = _model_setting(
        None, "Hub revision of the model (branch, tag or commit)."
    )
    seed: int = _model_setting(
        0, "Seed of the engine: of dummy weights and of requests without one."
    )
    logprobs_mode: Literal[
        "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    ] = _model_setting(
        "raw_logprobs",
        "What logprobs of requests without a logprobs_mode are: of the model's own logits (raw) or "
        "of the distribution from which tokens are drawn (processed).",
    )
    skip_tokenizer_init: bool = _model_setting(False, "Serve token ids only; load no tokenizer.")
    device: str = _device_setting("auto", "auto, cpu, cuda or cuda:N.", common=True)
    gpu_memory_utilization: float = _device_setting(
        0.9, "Share of the GPU's memory Quire may use.", limit=SHARE, common=True
    )
    kv_cache_gb: float | None = _device_setting(
        None,
        "Memory for the KV cache in GB, instead of measuring. Default on CPU: 4, or less.",
        limit=POSITIVE,
        common=True,
    )
    kv_cache_dtype: str = _device_setting(
        "auto",
        "How KV is stored. auto: in dtype. fp8: e4m3 with the checkpoint's scales per head, or 1; "
        "fp8_dynamic, int8: with a scale per token and head.",
        common=True,
    )
    tensor_parallel_size: int = _device_setting(1, "GPUs that share each layer.", limit=COUNT)
    pipeline_parallel_size: int = _device_setting(
        1, "Layers' stages, each on tensor_parallel_size GPUs.", limit=COUNT
    )
    enable_expert_parallel: bool = _device_setting(
        False, "Ranks hold whole experts, not parts of all."
    )
    nnodes: int = _device_setting(1, "Machines, each with as many whole stages.", limit=COUNT)
    node_rank: int = _device_setting(
        0, "This machine's number; on 0 the engine runs, others wait for it."
    )
    master_addr: str = _device_setting("127.0.0.1", "Address of machine 0.")
    master_port: int = _device_setting(
        29600, "Port there for other machines; the next one is used, too."
    )
    distributed_executor: Literal["process", "ray"] = _device_setting(
        "process", "Who places ranks: each machine its own, or Ray, which finds the machines."
    )
    async_tp: Literal["auto", "on", "off"] = _device_setting(
        "off", "Long prompts as two halves, one's sums over ranks beside the other's products."
    )
    num_kv_blocks: int | None = _device_setting(
        None, "KV blocks to allocate, instead of measuring.", limit=COUNT
    )
    block_size: int = _device_setting(16, "Tokens per KV block.", limit=POWER_OF_TWO)
    enable_prefix_caching: bool = _device_setting(True, "Reuse KV blocks of equal prefixes.")
    max_num_seqs: int | None = _scheduling_setting(
        None,
        "Most requests in one step. Default: 256 on a GPU, 64 on CPU.",
        limit=COUNT,
        common=True,
    )
    max_num_batched_tokens: int | None = _scheduling_setting(
        None,
        "Most tokens in one step. Default: 8192 on a GPU, 2048 on CPU, fewer in stages.",
        limit=COUNT,
        common=True,
    )
    max_queue: int | None = _scheduling_setting(
        None,
        "Most requests that may wait; more are refused with 503, unless their key has less than "
        "its share of the queue. Default: no limit.",
        limit=COUNT,
    )
    max_queue_tokens: int | None = _scheduling_setting(
        None, "Most prompt tokens that may wait, as max_queue.", limit=COUNT
    )
    scheduling_policy: Literal["fcfs", "priority"] = _scheduling_setting(
        "fcfs", "Queue order: arrival, or priority with ageing (lower runs first)."
    )
    priority_weight: float = _scheduling_setting(
        10.0, "Ageing: one unit of priority is worth this many seconds of waiting.", limit=SIZE
    )
    enable_chunked_prefill: bool = _scheduling_setting(
        True, "Split long prompts over steps, beside decodes."
    )
    steps_in_flight: int | None = _scheduling_setting(
        None,
        "Steps launched before the oldest is read. Default: 2 on a GPU, 1 on CPU.",
        limit=COUNT,
    )
    enforce_eager: bool = _kernel_setting(
        False,
        "Launch kernels one by one instead of as CUDA graphs (slower; no capture at start).",
        common=True,
    )
    deterministic: bool = _kernel_setting(
        False,
        "Make results depend on the request alone, to the bit: not on the batch, on chunking, "
        "preemption, prefix hits or the number of ranks. Slower.",
    )
    disable: tuple[str, ...] = _kernel_setting(
        (), f"Optimization to switch off, to measure its worth: {', '.join(OPTIMIZATIONS)}."
    )
    trace_dir: str | None = setting(
        None,
        "Folder for a trace of every step, for Perfetto (256 MB at most; slows it a little).",
        subject="Watching",
    )

    feature_args: ClassVar[tuple[type[FeatureArgs], ...]] = ()
    """The classes of features' settings, which `EngineArgs` has."""
    feature_errors: ClassVar[list[ConfigError]] = []
    """Why features of other packages were left out."""

    def __post_init__(self) -> None:
        for error in self.feature_errors:
            raise error
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            name, hint, limit = each.name, hints[each.name], each.metadata.get("limit")
            value = _checked(name, getattr(self, name), hint)
            object.__setattr__(self, name, value)
            if get_origin(hint) is Literal:
                _one_of(name, value, get_args(hint))
            if value is not None and limit is not None and not limit.allows(value):
                raise ConfigError(f"{name} must be {limit.wording}, got {value}", name)
        for kind in self.feature_args:
            kind.of(self).check(self)
        for name in self.disable:
            _one_of("disable", name, OPTIMIZATIONS)
        for part in () if self.quantization is None else self.quantization.split(","):
            _one_of("quantization", part, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    @property
    def ranks(self) -> int:
        """Number of devices that the engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def parallel(self) -> bool:
        """Whether any setting of several ranks or machines is used."""
        sizes = self.ranks, self.nnodes, self.node_rank + 1
        others = self.distributed_executor != "process" or self.async_tp == "on"
        return self.enable_expert_parallel or others or max(sizes) > 1

    def replace(self, **settings: Any) -> Self:
        """Returns a copy with other values of these settings."""
        return dataclasses.replace(self, **settings)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
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
class FeatureArgs:
    """The base of a feature's settings.

    A subclass is a frozen dataclass whose fields `setting` declares. Each field is a setting of
    `EngineArgs`, and so a keyword, a flag, a variable and a YAML key.
    """

    @classmethod
    def of(cls, args: CoreArgs) -> Self:
        """Returns the feature's part of an engine's settings."""
        return cls(**{each.name: getattr(args, each.name) for each in dataclasses.fields(cls)})

    def check(self, args: CoreArgs) -> None:
        """Raises ConfigError where the feature's settings contradict others.

        Args:
            args: all settings of the engine.
        """


_ENGINE_ARGS = (
    "An engine's settings, as users give them. None: chosen from the model and the device."
)

if TYPE_CHECKING:

    class EngineArgs(CoreArgs):
        """An engine's settings, as users give them: `CoreArgs`, and the settings of features.

        `FeatureSpec.args` names a feature's settings, `FeatureArgs.of` returns them with types.
        """

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:

    def __getattr__(name: str) -> Any:
        # The class is made when it is first needed, because features' settings import this module.
        if name != "EngineArgs":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if "_features_load" in globals():
            raise ImportError(
                "a feature's FeatureSpec and settings are parts of EngineArgs: their modules must "
                "not import it"
            )
        globals()["_features_load"] = True
        globals()["EngineArgs"] = made = _engine_args()
        return made

    def _engine_args() -> type[CoreArgs]:
        # A plugin point: every feature may add settings.
        from quire.features.registry import feature_args, feature_errors

        parts = feature_args(CoreArgs)
        fields = [
            (
                each.name,
                get_type_hints(part)[each.name],
                field(default=each.default, metadata=each.metadata),
            )
            for part in parts
            for each in dataclasses.fields(part)
        ]

        return dataclasses.make_dataclass(
            "EngineArgs",
            fields,
            bases=(CoreArgs,),
            namespace={
                "__doc__": _ENGINE_ARGS,
                "__module__": __name__,
                "feature_args": tuple(parts),
                "feature_errors": feature_errors(),
            },
            frozen=True,
            kw_only=True,
        )


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
        task: what the model is for. "embed", "classify" and "tokens" (a vector for each token) are
            encoders, which generate nothing.
        pooling: how embeddings are pooled.
        matryoshka: sizes that embeddings may be shortened to; () for any, None for no other size.
        vector_size: numbers of a vector, 0 for `hidden_size`.
        labels: names of the classes of a classification head.
        class_activation: turns logits of classes into what `/classify` answers.
        score_activation: turns the logit of a pair into its score.
        prompts: texts before inputs, by name.
        default_prompt: name of the prompt of requests that name none, or None.
        images: whether prompts may have images.
        experts_per_token: number of a token's experts in all layers, if requests may return them.
    """

    args: EngineArgs  # a module that makes a type of this one imports `EngineArgs` as well
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
    task: Literal["generate", "embed", "classify", "tokens"] = "generate"
    pooling: Literal["last", "mean", "cls", "max"] = "last"
    matryoshka: tuple[int, ...] | None = None
    vector_size: int = 0
    labels: tuple[str, ...] = ()
    class_activation: Literal["identity", "sigmoid", "softmax"] = "softmax"
    score_activation: Literal["identity", "sigmoid"] = "sigmoid"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    images: bool = False
    experts_per_token: int = 0

    @property
    def encoder(self) -> bool:
        """Whether the model is an encoder."""
        return self.task != "generate"

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt. A model that generates needs room for one token more."""
        return self.scheduler.max_model_len - (not self.encoder)

    @property
    def embedding_size(self) -> int:
        """Numbers of a vector."""
        return self.vector_size or self.hidden_size

    @property
    def eager(self) -> bool:
        """Whether kernels are launched one by one."""
        return self.args.enforce_eager or "graphs" in self.args.disable
