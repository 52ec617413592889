"""Outputs of requests, finished or growing, as users see them, offline and in the server."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.arrays import Float32, Int16, Int32


class Logprob(msgspec.Struct, gc=False):
    """A token's log-probability.

    There may be millions, so the garbage collector skips them (`gc=False`): they refer to no other
    object.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the likeliest token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


VersionRun = tuple[int, int]
"""A version of the weights, and the number of a completion's next tokens that it gave."""


@dataclass(slots=True)
class SamplingInfo:
    """Numbers about the draws of a completion's tokens, with an entry for each token.

    Attributes:
        raw_logprobs: float32 [tokens], log-probabilities under the model's own logits.
        processed_logprobs: float32 [tokens], log-probabilities under the distribution from which
            the tokens were drawn: after penalties, masks, temperature, min-p, top-k and top-p.
        mask_sizes: int32 [tokens], number of tokens that could be drawn.
    """

    raw_logprobs: Float32
    processed_logprobs: Float32
    mask_sizes: Int32


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    Attributes:
        index: its number among them.
        weight_versions: the versions of the weights that gave its tokens, in order. Version 0 are
            the weights that the engine began with.
        finish_reason: None until it ends. "error": a logit was not a number, or a grammar failed.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence
            token.
        sampling_info: how its tokens were drawn, if the request asks for it and it has ended.
        routed_experts: int16 [prompt and output tokens - 1, layers with experts, experts per token]
            or None. The last token has no experts, because no step computes with it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionRun] = field(default_factory=list)
    sampling_info: SamplingInfo | None = None
    routed_experts: Int16 | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt as a vector, or as a vector for each token (late interaction)."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A finished request for a vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A finished request for classes.

    Attributes:
        probs: the value of each class.
        label: name of the likeliest class.
    """

    request_id: str
    probs: list[float]
    label: str
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ScoringRequestOutput:
    """A finished request for the score of a pair.

    Attributes:
        num_prompt_tokens: tokens of both texts.
    """

    request_id: str
    score: float
    num_prompt_tokens: int
    finished: bool = True


@dataclass(slots=True)
class RequestTimes:
    """Times of a completion's events, in seconds of `time.monotonic`. None: it has not come.

    Attributes:
        finished: None also for an aborted completion.
        delays: seconds by cause, which add up to the time from arrival to end. The causes are those
            of `quire.scheduler.delays`, and what features wait for.
        phase: cause of the seconds since `phase_began`; "" once the completion has ended.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    delays: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    phase_began: float = 0.0

    def __post_init__(self) -> None:
        self.phase_began = self.arrival

    @property
    def queued(self) -> float:
        """Seconds it waited for its first step; 0 before that."""
        return 0.0 if self.first_scheduled is None else self.first_scheduled - self.arrival


@dataclass(slots=True)
class RequestOutput:
    """A request with all of its completions.

    Attributes:
        prompt_logprobs: by token of the prompt; None for the first, which nothing predicts.
        metrics: the times of the first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestTimes | None = None
