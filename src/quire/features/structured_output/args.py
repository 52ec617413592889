"""The settings of structured output."""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.config import COUNT, SIZE, CoreArgs, FeatureArgs, Limit, setting
from quire.errors import ConfigError

MOST_PROCESSES = 64
_MOST_BY_DEFAULT = 12
_SUBJECT = "API"
_TIMEOUT = Limit(lambda seconds: 0.0 < seconds <= 3600.0, "in (0, 3600]")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputArgs(FeatureArgs):
    """The limits of the compilation of schemas and grammars."""

    structured_outputs_timeout: float = setting(
        5.0, "Seconds to compile a schema or grammar in.", limit=_TIMEOUT, subject=_SUBJECT
    )
    structured_outputs_drafts: int = setting(
        0,
        "Most tokens of a text that a schema forces to compute at once, up to 16; 0: none. 7 suits "
        "documents of long names and few streams.",
        limit=Limit(lambda count: 0 <= count <= 16, "from 0 to 16"),
        subject=_SUBJECT,
    )
    structured_outputs_wait_us: float = setting(
        100.0,
        "Microseconds that a step waits for late masks: for each row without one, but only once if "
        "other rows need none. Rows whose masks are later still sit the step out.",
        limit=Limit(lambda us: 0.0 <= us <= 1e6, "in [0, 1000000]"),
        subject=_SUBJECT,
    )
    structured_outputs_processes: int | None = setting(
        None,
        "Processes that build masks, each on one core; 0: a thread of the engine. Default: three "
        "quarters of the cores, at most 12; 0 on a CPU.",
        limit=Limit(lambda count: 0 <= count <= MOST_PROCESSES, f"from 0 to {MOST_PROCESSES}"),
        subject=_SUBJECT,
    )
    structured_outputs_memory_mb: float = setting(
        64.0,
        "MB of the host's memory for masks of schemas that come again; 0: keep none.",
        limit=SIZE,
        subject=_SUBJECT,
    )
    structured_outputs_cache: int = setting(
        128, "Compiled schemas and grammars to keep.", limit=COUNT, subject=_SUBJECT
    )

    def check(self, args: CoreArgs) -> None:
        stages = args.pipeline_parallel_size
        if self.structured_outputs_drafts and stages > 1:
            # Earlier stages would have to know of such drafts.
            raise ConfigError(
                f"structured_outputs_drafts {self.structured_outputs_drafts} is not for "
                f"--pipeline-parallel-size {stages}; leave it out, or make it 0",
                "structured_outputs_drafts",
            )


def mask_processes(args: StructuredOutputArgs, device: str) -> int:
    """Returns the number of processes that build masks for an engine."""
    if args.structured_outputs_processes is not None:
        return args.structured_outputs_processes
    if device == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_BY_DEFAULT, 3 * (cores or 1) // 4))
