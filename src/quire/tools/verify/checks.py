"""Checks. Each sends requests whose correct results do not depend on the server's model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.tools.verify.outcome import FailedError, NotOfferedError, require, require_same
from quire.tools.verify.routes import CHAT, CheckedAnswer, TokenLogprob
from quire.tools.verify.session import LIMIT, PROMPT, Session

_SEED = 20_260_101
_TOP = 5
_ROUNDING = 1e-3
"""Largest error of a sum of probabilities, and largest difference of equal log-probabilities."""
_OPEN_PROMPT = "Write a poem about the sea."
_HOT = 2.0
"""The highest temperature of OpenAI's API. With it even small models give different answers."""
_STOP_LENGTH = 3
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_REPLACEMENT = "\ufffd"
"""The last character of a text that ends inside a character."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: name of the check.
        run: returns a text that says what was compared. Raises FailedError or NotOfferedError.
        chat_only: whether OpenAI's API has the field only on the chat route.
    """

    name: str
    run: Callable[[Session], str]
    chat_only: bool = False


def greedy_twice(session: Session) -> str:
    again = session.ask(session.body(PROMPT, LIMIT))
    _require_same_answer(session.greedy(), again, "two greedy answers")
    return _tokens(again)


def same_seed(session: Session) -> str:
    body = session.body(PROMPT, LIMIT, temperature=1.0, seed=_SEED)
    first = session.ask(body, needs="seed")
    second = session.ask(body)
    _require_same_answer(first, second, "two answers of one seed")
    return _tokens(second)


def other_seeds(session: Session) -> str:
    """Asks an open question with four seeds. Four equal answers mean that seeds are ignored."""
    texts = set()
    for seed in range(_SEED, _SEED + 4):
        body = session.body(_OPEN_PROMPT, LIMIT, temperature=_HOT, seed=seed)
        choice = session.ask(body, needs="seed").first
        texts.add((choice.reasoning, choice.text))
    require(len(texts) > 1, f"four seeds of temperature {_HOT} give the same text")
    return f"{len(texts)} texts of 4 seeds"


def stream_is_whole(session: Session) -> str:
    """Compares text and finish reason, and usage if streams have it."""
    whole, body = session.greedy(), session.body(PROMPT, LIMIT)
    told = True
    try:
        options = {"include_usage": True}
        streamed = session.stream({**body, "stream_options": options}, needs="stream_options")
        require(streamed.usage is not None, "include_usage is taken, and no chunk has usage")
    except NotOfferedError:
        told = False
        streamed = session.stream(body, needs="stream")
    _require_same_answer(whole, streamed, "the whole and the streamed answer", counts=told)
    return _tokens(whole) + ("" if told else "; stream_options is refused, so usage is unknown")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "enum": ["fox", "heron", "otter"]},
        "legs": {"type": "integer", "enum": [2, 4]},
        "awake": {"type": "boolean"},
    },
    "required": ["animal", "legs", "awake"],
    "additionalProperties": False,
}


def schema_enforced(session: Session) -> str:
    """Asks for something else at a high temperature, so that only a grammar leads to the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True}}
    form["json_schema"]["schema"] = SCHEMA  # type: ignore[index]
    body = session.body(_OPEN_PROMPT, 4 * LIMIT, temperature=1.0, response_format=form)
    for _ in range(3):
        choice = session.ask(body, needs="response_format").first
        require(
            choice.finish_reason == "stop",
            f"finish_reason is {choice.finish_reason!r} after {choice.text[:80]!r}",
        )
        _require_schema(choice.text)
    return "3 answers"


def _require_schema(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise FailedError(f"the answer is not JSON: {text[:80]!r}") from None
    fits = (
        isinstance(value, dict)
        and set(value) == set(SCHEMA["properties"])
        and value["animal"] in SCHEMA["properties"]["animal"]["enum"]
        and type(value["legs"]) is int
        and value["legs"] in SCHEMA["properties"]["legs"]["enum"]
        and isinstance(value["awake"], bool)
    )
    require(fits, f"the answer does not match the schema: {text[:80]!r}")


def stop_strings(session: Session) -> str:
    """Stops at a piece of the greedy answer, which must then end just before it."""
    text = session.greedy().first.text
    stop = _stop_of(text)
    wanted = text[: text.index(stop)]
    body = session.body(PROMPT, LIMIT, stop=[stop])
    for name, answer in (
        ("the answer", session.ask(body, needs="stop")),
        ("the stream", session.stream(body)),
    ):
        choice = answer.first
        require_same("text", wanted, choice.text, f"the text up to {stop!r} and {name}")
        require(
            choice.finish_reason == "stop",
            f"{name} stopped at {stop!r} has finish_reason {choice.finish_reason!r}",
        )
    return f"stopped at {stop!r}"


def _stop_of(text: str) -> str:
    """Returns a piece from the middle of the text. The text must not begin with the same piece."""
    for at in range(len(text) // 2, len(text) - _STOP_LENGTH + 1):
        piece = text[at : at + _STOP_LENGTH]
        if text.index(piece) and piece == piece.strip() and _REPLACEMENT not in piece:
            return piece
    raise NotOfferedError(f"the greedy answer is too short or too uniform to cut: {text[:40]!r}")


def logprobs_consistent(session: Session) -> str:
    body = session.body(PROMPT, LIMIT // 2, **session.route.logprobs)
    answer = session.ask(body, needs="logprobs")
    choice = answer.first
    require(bool(choice.logprobs), "logprobs are asked for and missing")
    for place, entry in enumerate(choice.logprobs):
        _require_ranked(entry, f"token {place}, {entry.token!r},", session.route is CHAT)
    count = answer.tokens("completion_tokens")
    # Servers differ in whether a token that ends the answer has an entry.
    require(
        len(choice.logprobs) in (count, count - 1),
        f"{len(choice.logprobs)} log-probabilities for {count} tokens",
    )
    if all(entry.data is not None for entry in choice.logprobs) and not choice.reasoning:
        joined = b"".join(entry.data or b"" for entry in choice.logprobs).decode("utf-8", "replace")
        text = choice.text.strip().rstrip(_REPLACEMENT)
        require(joined.strip().startswith(text), f"tokens {joined!r} are not the text {text!r}")
    return f"{len(choice.logprobs)} tokens"


def _require_ranked(entry: TokenLogprob, name: str, ordered: bool) -> None:
    """Checks the log-probabilities of one greedy token.

    Args:
        ordered: whether `top` is in order of rank.
    """
    require(
        entry.logprob <= _ROUNDING and not math.isnan(entry.logprob),
        f"{name} has log-probability {entry.logprob}",
    )
    # The generated token may be listed in addition to the requested number of tokens.
    most = _TOP if ordered else _TOP + 1
    require(0 < len(entry.top) <= most, f"{name} has {len(entry.top)} of {_TOP} likeliest tokens")
    values = [value for _, value in entry.top]
    total = sum(map(math.exp, values))
    require(total <= 1.0 + _ROUNDING, f"{name} has alternatives of probability {total:.4f} in all")
    if ordered:
        require(values == sorted(values, reverse=True), f"{name} has alternatives out of order")
    best = max(values)
    require(
        abs(entry.logprob - best) <= _ROUNDING,
        f"{name} has log-probability {entry.logprob:.4f}, the likeliest one {best:.4f}",
    )
    near = [token for token, value in entry.top if best - value <= _ROUNDING]
    require(entry.token in near, f"{name} was chosen greedily, and the likeliest is {near[0]!r}")


def usage_adds_up(session: Session) -> str:
    whole = session.greedy()
    prompt, completion, total = map(whole.tokens, _COUNTS)
    require(prompt + completion == total, f"{prompt} + {completion} tokens are counted as {total}")
    require(0 < completion <= LIMIT, f"{completion} tokens are counted of {LIMIT} at most")
    longer = session.ask(session.body(f"{PROMPT} {PROMPT}", 1)).tokens("prompt_tokens")
    require(longer > prompt > 0, f"a prompt has {prompt} tokens, and twice the text {longer}")
    details = (whole.usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    require(
        isinstance(cached, int) and 0 <= cached <= prompt,
        f"{cached!r} tokens of {prompt} came from a cache",
    )
    return f"{prompt} + {completion} = {total}"


def max_tokens_respected(session: Session) -> str:
    whole = session.greedy()
    for limit in (1, 7):
        answer = session.ask(session.body(PROMPT, limit))
        count, choice = answer.tokens("completion_tokens"), answer.first
        require(count <= limit, f"{count} tokens with {session.limit}={limit}")
        if whole.tokens("completion_tokens") > limit:
            require(
                count == limit and choice.finish_reason == "length",
                f"{count} tokens and finish_reason {choice.finish_reason!r} with "
                f"{session.limit}={limit}, though the answer goes on",
            )
        start = choice.text.rstrip(_REPLACEMENT)
        require(
            whole.first.text.startswith(start),
            f"{session.limit}={limit} gives {start!r}, which does not begin the longer answer",
        )
    return "1 and 7 tokens"


def n_choices(session: Session) -> str:
    count, limit = 3, LIMIT // 2
    body = session.body(PROMPT, limit, temperature=1.0, n=count)
    whole = session.ask(body, needs="n")
    for name, answer in (("the answer", whole), ("the stream", session.stream(body))):
        require(
            sorted(answer.choices) == list(range(count)),
            f"{name} to n={count} has the choices {sorted(answer.choices)}",
        )
        for index, choice in answer.choices.items():
            require(choice.finish_reason is not None, f"choice {index} of {name} has no end")
    tokens = whole.tokens("completion_tokens")
    require(tokens <= count * limit, f"{tokens} tokens are counted of {count} x {limit} at most")
    ends = [choice.finish_reason for choice in whole.choices.values()]
    if set(ends) == {"length"}:
        require(tokens == count * limit, f"{tokens} tokens are counted of {count} x {limit}")
    return f"n={count}, {tokens} tokens"


def unknown_model(session: Session) -> str:
    body = {**session.body(PROMPT, 1), "model": f"{session.model}-which-is-not-there"}
    return _require_refused(session, body, 404, "an unknown model")


def bad_parameters(session: Session) -> str:
    for name, body in (
        ("temperature=-1", session.body(PROMPT, 1, temperature=-1)),
        (f"{session.limit}='many'", session.body(PROMPT, 1, **{session.limit: "many"})),
        ("a body that is no JSON", "{"),
    ):
        _require_refused(session, body, 400, name)
    session.ask(session.body(PROMPT, 1))
    return "3 bad requests, then a good one"


def _require_refused(session: Session, body: Any, status: int, name: str) -> str:
    """Requires an error of this status in OpenAI's format. Returns its message."""
    reply = session.post(body)
    require(reply.status == status, f"{name} is answered with {reply.status}, not {status}")
    require(bool(reply.message), f"the {status} for {name} has no error.message")
    return reply.message


def _require_same_answer(
    first: CheckedAnswer, second: CheckedAnswer, places: str, counts: bool = True
) -> None:
    for name in ("reasoning", "text", "finish_reason"):
        require_same(name, getattr(first.first, name), getattr(second.first, name), places)
    require(first.first.finish_reason is not None, "an answer has no finish_reason")
    for name in _COUNTS if counts else ():
        require_same(f"usage.{name}", first.tokens(name), second.tokens(name), places)


def _tokens(answer: CheckedAnswer) -> str:
    return f"{answer.tokens('completion_tokens')} tokens"


CHECKS = (
    Check("greedy twice the same", greedy_twice),
    Check("same seed, same tokens", same_seed),
    Check("other seeds, other tokens", other_seeds),
    Check("stream equals whole", stream_is_whole),
    Check("JSON schema enforced", schema_enforced, chat_only=True),
    Check("stop strings cut exactly", stop_strings),
    Check("log-probabilities consistent", logprobs_consistent),
    Check("usage adds up", usage_adds_up),
    Check("max_tokens respected", max_tokens_respected),
    Check("n choices", n_choices),
    Check("unknown model is 404", unknown_model),
    Check("bad parameter is 400", bad_parameters),
)
