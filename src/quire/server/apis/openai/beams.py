"""Fields of beam search, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.engine.loop.beam_search import MAX_WIDTH, BeamSearchParams
from quire.sampling_params import OPENAI, SamplingParams
from quire.server.apis.sampling import parameters_of
from quire.server.errors import ApiError
from quire.server.http.strict_model import StrictModel

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{
        p.name: (None, p.default, *p.declared.neutral)
        for p in parameters_of(OPENAI)
        if not p.declared.in_beam_search
    },
    "logit_bias": (None, {}),
    "stop": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "stream": (None, False),
}
"""Fields that a beam search refuses, with the values that it lets through."""


class BeamFields(StrictModel):
    """Fields of a beam search. The last two are refused without `use_beam_search`."""

    use_beam_search: bool | None = None
    beam_width: int | None = Field(None, ge=1, le=MAX_WIDTH)
    length_penalty: float | None = Field(None, ge=-10.0, le=10.0)


def beams_of(
    body: Any, params: SamplingParams, n: int, best_of: int | None
) -> BeamSearchParams | None:
    """Returns the parameters of the beam search, or None if the request asks for none.

    Args:
        n: sequences to return.
        best_of: another name of `beam_width`, which is `n` by default.

    Raises:
        ApiError: naming the field.
    """
    if not body.use_beam_search:
        for name in ("beam_width", "length_penalty"):
            if getattr(body, name) is not None:
                raise _wrong(name, "needs use_beam_search=true")
        return None
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise _wrong(name, "is not available with use_beam_search=true")
    if params.structured_outputs is not None:
        raise _wrong("use_beam_search", "and structured outputs exclude each other")
    width = body.beam_width or best_of or n
    if body.beam_width and best_of and body.beam_width != best_of:
        raise _wrong("best_of", "and 'beam_width' are two names of one setting; they differ")
    if width < n:
        raise _wrong("beam_width", "must not be less than 'n'")
    if width > MAX_WIDTH:
        raise _wrong("best_of" if best_of else "n", f"is a beam's width: at most {MAX_WIDTH}")
    penalty = body.length_penalty
    return BeamSearchParams(
        beam_width=width,
        max_tokens=params.max_tokens,
        length_penalty=1.0 if penalty is None else penalty,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
    )


def _wrong(name: str, why: str) -> ApiError:
    return ApiError(400, f"'{name}' {why}.", param=name, code="invalid_value")
