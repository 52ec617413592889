"""The generating routes of OpenAI's API: builds their bodies, and reads their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.tools.verify.outcome import FailedError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a generated token.

    Attributes:
        token: the token's text.
        data: the token's bytes; None if the server does not send them.
        logprob: the token's log-probability.
        top: the likeliest tokens and their log-probabilities, in the server's order.
    """

    token: str
    data: bytes | None
    logprob: float
    top: list[tuple[str, float]]


@dataclass(slots=True)
class CheckedChoice:
    """One completion.

    Attributes:
        text: the answer.
        reasoning: a chat model's reasoning before the answer.
        finish_reason: the server's finish reason; None before the end.
        logprobs: log-probabilities of the generated tokens.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class CheckedAnswer:
    """The answer to a request.

    Attributes:
        choices: completions by their index.
        usage: the server's counts of tokens; None if it sent none.
    """

    choices: dict[int, CheckedChoice]
    usage: Json | None

    @property
    def first(self) -> CheckedChoice:
        if 0 not in self.choices:
            raise FailedError("the answer has no choice of index 0")
        return self.choices[0]

    def tokens(self, name: str) -> int:
        """Returns a count of `usage`. Raises FailedError if it is missing or not a count."""
        count = (self.usage or {}).get(name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise FailedError(f"usage.{name} is {count!r}")
        return count


@dataclass(frozen=True, slots=True)
class CheckedRoute:
    """One generating route.

    Attributes:
        name: "chat" or "completions".
        path: path of the URL.
        prompt: returns the body's fields for a prompt.
        logprobs: the body's fields that ask for the 5 likeliest tokens.
        add: adds a choice of an answer, or of a stream's chunk, to a `CheckedChoice`.
    """

    name: str
    path: str
    prompt: Callable[[str], Json]
    logprobs: Json
    add: Callable[[CheckedChoice, Json], None]


def _chat_prompt(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


def _add_chat(choice: CheckedChoice, raw: Json) -> None:
    message = raw.get("message") or raw.get("delta") or {}
    choice.text += message.get("content") or ""
    choice.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    for entry in (raw.get("logprobs") or {}).get("content") or []:
        data = entry.get("bytes")
        top = [(other["token"], float(other["logprob"])) for other in entry["top_logprobs"]]
        choice.logprobs.append(
            TokenLogprob(
                entry["token"], None if data is None else bytes(data), float(entry["logprob"]), top
            )
        )


def _completion_prompt(text: str) -> Json:
    return {"prompt": text}


def _add_completion(choice: CheckedChoice, raw: Json) -> None:
    choice.text += raw["text"] or ""
    found = raw.get("logprobs") or {}
    tokens = found.get("tokens") or []
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    for token, value, top in zip(tokens, found.get("token_logprobs") or [], tops, strict=True):
        choice.logprobs.append(
            TokenLogprob(token, None, float(value), [(name, float(p)) for name, p in top.items()])
        )


CHAT = CheckedRoute(
    "chat",
    "/v1/chat/completions",
    _chat_prompt,
    {"logprobs": True, "top_logprobs": 5},
    _add_chat,
)
COMPLETIONS = CheckedRoute(
    "completions", "/v1/completions", _completion_prompt, {"logprobs": 5}, _add_completion
)
ROUTES = (CHAT, COMPLETIONS)


def add_choices(route: CheckedRoute, choices: dict[int, CheckedChoice], body: Json) -> None:
    """Adds the choices of an answer or a chunk. Raises FailedError if the format is wrong."""
    try:
        for raw in body["choices"]:
            choice = choices.setdefault(int(raw["index"]), CheckedChoice())
            ended, length = choice.finish_reason, len(choice.text)
            route.add(choice, raw)
            if ended is not None and len(choice.text) > length:
                raise FailedError(f"choice {raw['index']} goes on after its finish_reason")
            reason = raw.get("finish_reason")
            if not isinstance(reason, str | None):
                raise FailedError(f"finish_reason is {reason!r}")
            choice.finish_reason = reason or ended
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FailedError(f"the answer does not have OpenAI's format: {error!r}") from None


def usage_of(body: Json) -> Json | None:
    """Returns the token counts of an answer or a chunk. Raises FailedError if the format is
    wrong."""
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(usage, dict | None) or not isinstance(details, dict | None):
        raise FailedError(f"usage is {usage!r}")
    return usage
