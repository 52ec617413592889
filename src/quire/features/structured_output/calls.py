"""The check of a grammar for callers that answer before the request runs."""

from __future__ import annotations

from quire.errors import RequestError
from quire.features.call import Callers, CallType
from quire.sampling_params import StructuredOutputsParams


def no_grammars() -> RequestError:
    """Returns the error of an engine without grammars."""
    return RequestError(
        "structured outputs need a tokenizer, which was not loaded", "structured_outputs"
    )


CHECK_GRAMMAR: CallType[StructuredOutputsParams, None] = CallType(
    "structured_output.check", StructuredOutputsParams, type(None), refusal=no_grammars
)
"""Compiles a grammar. The answer comes when it is compiled, and the engine keeps it."""
CALLS = (CHECK_GRAMMAR,)


async def check_grammar(client: Callers, grammar: StructuredOutputsParams) -> None:
    """Waits until an engine has compiled a grammar.

    Raises:
        RequestError: the grammar cannot be enforced.
        CompilerBusyError: other grammars took too long.
        EngineDeadError: the engine is gone.
    """
    await client.first_alive.call(CHECK_GRAMMAR, grammar)
