"""The check of a request's grammar, where the request arrives."""

from __future__ import annotations

import asyncio

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.features.structured_output.compiler import Compiler, build_compiler
from quire.sampling_params import SamplingParams

_CHECKED_GRAMMARS = 16
"""Compiled grammars to keep here, where they are only checked."""


class GrammarCheck:
    """Compiles grammars in order to refuse those that cannot be enforced."""

    def __init__(self, config: EngineConfig) -> None:
        self._compiler: Compiler | None = None
        if config.tokenizer_path is not None:
            self._compiler = build_compiler(config, cached=_CHECKED_GRAMMARS)

    async def check(self, params: SamplingParams) -> None:
        """Compiles a request's grammar, off the event loop.

        Raises:
            RequestError: it cannot be enforced.
            CompilerBusyError: other grammars took too long.
        """
        grammar, compiler = params.structured_outputs, self._compiler
        if grammar is None:
            return
        if compiler is None:
            raise RequestError(
                "structured outputs need a tokenizer, which was not loaded", "structured_outputs"
            )
        verdict = asyncio.wrap_future(compiler.checked(grammar))
        try:
            await asyncio.wait((verdict,), timeout=compiler.config.timeout)
            if not verdict.done():
                raise compiler.late(grammar)
        finally:
            if not verdict.done():
                compiler.forget(grammar)
        verdict.result()

    def close(self) -> None:
        """Ends the compiler's threads. Idempotent."""
        if self._compiler is not None:
            self._compiler.shutdown()
