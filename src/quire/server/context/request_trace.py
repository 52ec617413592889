"""The parts of a request's trace that its route records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope


@dataclass(slots=True)
class PromptPhases:
    """The times at which a prompt went through the engine.

    Attributes:
        start, end, first_token: times of `time.perf_counter`.
        queued: seconds until its first step; None if no first step is known.
        prompt_tokens: the prompt's tokens.
        cached_tokens: the tokens of them that were in the prefix cache.
        output_tokens: tokens of all its completions.
        delays: seconds in the engine by cause, of the completion that was heard of last.
    """

    start: float
    end: float
    queued: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    delays: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Handover:
    """A prompt that was computed for another engine.

    Attributes:
        start, end: times of `time.perf_counter`.
        tokens: the prompt's tokens.
        outcome: how the grant ended; "done" is success.
        computed: time of `time.perf_counter` at which the prompt was computed; None if it was not.
    """

    start: float
    end: float
    tokens: int
    outcome: str
    computed: float | None = None


@dataclass(slots=True)
class RequestTrace:
    """The data for the spans of one HTTP request.

    Attributes:
        operation: the name of the route's operation in the GenAI conventions.
        parent: OpenTelemetry's context from the request's `traceparent`.
        scope: the request's ASGI scope.
        prompts: the phases of each prompt.
        handover: set if the request comes from another engine that wants the prompt's KV.
    """

    operation: str
    parent: Any
    scope: Scope
    prompts: list[PromptPhases] = field(default_factory=list)
    handover: Handover | None = None
