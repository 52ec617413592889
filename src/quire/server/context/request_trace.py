"""The parts of a request's trace that its route records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope


@dataclass(slots=True)
class PromptPhases:
    """A prompt's way through the engine.

    Attributes:
        start, end, first_token: moments of `time.perf_counter`.
        queued: seconds until its first step; None where it is not known to have had one.
    """

    start: float
    end: float
    queued: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Handover:
    """A prompt that was computed for another engine.

    Attributes:
        start, end: moments of `time.perf_counter`. computed: the one at which the prompt was, None
            where it was not.
        outcome: how the grant ended.
    """

    start: float
    end: float
    tokens: int
    outcome: str
    computed: float | None = None


@dataclass(slots=True)
class RequestTrace:
    """The content of one HTTP request's spans.

    Attributes:
        operation: the GenAI conventions' name of the route.
        parent: OpenTelemetry's context from the request's `traceparent`.
        scope: the request's ASGI scope.
        handover: of the prompt, to the engine that asked for it.
    """

    operation: str
    parent: Any
    scope: Scope
    prompts: list[PromptPhases] = field(default_factory=list)
    handover: Handover | None = None
