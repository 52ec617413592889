"""Beam search, by requests that generate one token each.

Each step asks for the likeliest next tokens of every beam. The prefix cache holds the beams' common
prefixes, so a beam computes only its last token. Scores and the end of a search are as in
transformers with `early_stopping=False`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.config import EngineConfig
from quire.engine.loop.output import CompletionReader
from quire.engine.loop.prompts import Prompt, prompt_ids, read_prompt
from quire.errors import RequestError
from quire.outputs import Logprob, RequestOutput
from quire.sampling_params import MAX_LOGPROBS, SamplingParams
from quire.text.tokenizer import Tokenizer

MAX_WIDTH = 64


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search.

    Attributes:
        beam_width: Number of beams, and of sequences kept, 1 to 64.
        max_tokens: Most tokens of a sequence; None: as many as the context holds.
        length_penalty: A score is the sum of the log-probabilities, divided by the length to this
            power. Values above 0 prefer long sequences.
        ignore_eos: Only `stop_token_ids` end a sequence.
        stop_token_ids: Tokens that end a sequence, in addition to the model's own.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # `SamplingParams` checks the fields that both classes have.
        SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_WIDTH:
            raise RequestError(
                f"beam_width must be an integer from 1 to {MAX_WIDTH}, got {self.beam_width!r}",
                "beam_width",
            )
        penalty: object = self.length_penalty
        if type(penalty) not in (int, float) or not -10.0 <= self.length_penalty <= 10.0:
            raise RequestError(
                f"length_penalty must be a number in [-10, 10], got {penalty!r}", "length_penalty"
            )


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the best sequences of a search.

    Attributes:
        token_ids: Generated tokens, with the end token.
        text: Text without the end token.
        cum_logprob: Sum of the tokens' log-probabilities.
        score: `cum_logprob` divided by the length to the power of `length_penalty`.
        logprobs: For each token, its log-probability and those of its likeliest alternatives.
        finish_reason: "stop" or "length".
        stop_reason: The token of `stop_token_ids` at its end.
    """

    token_ids: list[int]
    cum_logprob: float
    score: float
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's best sequences, best first."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Beam:
    tokens: list[int]
    logprob: float
    entries: list[dict[int, Logprob]]


class BeamSearch:
    """The beams of one prompt.

    Raises:
        RequestError: the search needs more alternatives per token than an engine returns.
    """

    def __init__(self, params: BeamSearchParams, config: EngineConfig, prompt_len: int) -> None:
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(config.eos_token_ids)
        room = config.scheduler.max_model_len - prompt_len
        self._params = params
        self._ends = ends
        self._longest = room if params.max_tokens is None else min(room, params.max_tokens)
        self._beams = [_Beam([], 0.0, [])]
        self._found: list[tuple[float, _Beam]] = []
        self.over = False
        # A beam contributes at most one continuation per surviving beam, and each end token.
        self.alternatives = min(params.beam_width + len(ends), config.vocab_size)
        if self.alternatives > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width and the {len(ends)} tokens that end a sequence are more than "
                f"{MAX_LOGPROBS} together",
                "beam_width",
            )

    @property
    def step_params(self) -> SamplingParams:
        """Returns the sampling parameters of a beam's request."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=self.alternatives,
            logprobs_mode="raw_logprobs",
            ignore_eos=True,
            detokenize=False,
        )

    @property
    def beams(self) -> list[list[int]]:
        """Returns the tokens of each unfinished beam."""
        return [beam.tokens for beam in self._beams]

    def advance(self, found: Sequence[Mapping[int, Logprob]]) -> None:
        """Extends the beams.

        Args:
            found: for each beam, its likeliest next tokens.
        """
        params, length = self._params, len(self._beams[0].tokens) + 1
        width = params.beam_width
        candidates = [
            (beam.logprob + entry.logprob, place, token)
            for place, (beam, entries) in enumerate(zip(self._beams, found, strict=True))
            for token, entry in entries.items()
        ]
        # Enough candidates to fill all beams even if many of the best ones end.
        best = heapq.nsmallest(
            max(2, 1 + len(self._ends)) * width, candidates, key=lambda each: (-each[0], each[1:])
        )
        going: list[_Beam] = []
        for rank, (logprob, place, token) in enumerate(best):
            parent = self._beams[place]
            beam = _Beam([*parent.tokens, token], logprob, [*parent.entries, dict(found[place])])
            if token in self._ends or length == self._longest:
                if rank < width:
                    self._found.append((logprob / length**params.length_penalty, beam))
            elif len(going) < width:
                going.append(beam)
        self._found = sorted(self._found, key=lambda each: -each[0])[:width]
        self._beams = going
        self.over = not going or (
            len(self._found) == width
            and going[0].logprob / length**params.length_penalty <= self._found[-1][0]
        )

    def best(
        self,
        count: int,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        keep_special: frozenset[int] = frozenset(),
    ) -> list[BeamSearchSequence]:
        """Returns the `count` best sequences. params: options of detokenization."""
        sequences = []
        for score, beam in self._found[:count]:
            last = beam.tokens[-1]
            ended = last in self._ends
            reader = CompletionReader(0, prompt, params, tokenizer, keep_special)
            update = reader.feed(beam.tokens, (), "stop", last if ended else None)
            sequences.append(
                BeamSearchSequence(
                    beam.tokens,
                    beam.logprob,
                    score,
                    update.text,
                    [
                        {token: entry[token], **entry}
                        for token, entry in zip(beam.tokens, beam.entries, strict=True)
                    ],
                    "stop" if ended else "length",
                    last if ended and last in self._params.stop_token_ids else None,
                )
            )
        return sequences


def beam_search(
    generate: Callable[[list[list[int]], list[SamplingParams]], list[RequestOutput]],
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
) -> list[BeamSearchOutput]:
    """Searches for all prompts at once, in the caller's thread.

    Args:
        generate: completes prompts.

    Raises:
        QuireError: as `generate`.
    """
    shown = SamplingParams(stop_token_ids=params.stop_token_ids, detokenize=tokenizer is not None)
    given = [prompt_ids(read_prompt(p)[1], shown, config, tokenizer).tolist() for p in prompts]
    searches = [BeamSearch(params, config, len(prompt)) for prompt in given]
    while going := [pair for pair in zip(given, searches, strict=True) if not pair[1].over]:
        asked = [[*prompt, *tokens] for prompt, search in going for tokens in search.beams]
        step_params = [search.step_params for _, search in going for _ in search.beams]
        outputs = iter(generate(asked, step_params))
        for _, search in going:
            answers = [next(outputs).outputs[0].logprobs for _ in search.beams]
            search.advance([(each or [{}])[0] for each in answers])
    width = params.beam_width
    return [
        BeamSearchOutput(prompt, search.best(width, prompt, shown, tokenizer))
        for prompt, search in zip(given, searches, strict=True)
    ]
