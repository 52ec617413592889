"""Compiled grammars for one tokenizer, kept for those who ask again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.errors import GrammarError
from quire.sampling_params import StructuredOutputsParams
from quire.structured.grammar import compilable

K = TypeVar("K")
V = TypeVar("V")

# Work, not time: the same grammar is fit or not on every machine. Some seconds at the very most.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=1_000_000,
    step_max_items=100_000,
    max_lexer_states=1_000_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
_KEPT_VERDICTS = 1024

_CHAR = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHAR}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 16, 30)),
    f"{_CHAR}+",
]
"""Tokens that are allowed or not together, in a mask built from a few parts: text within a string,
by length. Without those of few characters, strings of a bounded length would cost a third more."""


@dataclass(frozen=True, kw_only=True)
class CompilerConfig:
    """timeout: seconds for one grammar, waiting included. cached: grammars to keep. threads: how
    many are compiled at once."""

    timeout: float = 10.0
    cached: int = 128
    threads: int = max(2, min(8, (os.cpu_count() or 2) // 2))


class Cache(Generic[K, V]):
    """The `size` most recently used values. Its owner locks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        return None

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)

    def discard(self, key: K) -> None:
        self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)


class Compiler:
    """Compiles on threads of its own. Thread-safe.

    Args:
        tokenizer: gives the text of a `tokenizer.json`. Called once, on a thread.
        vocab_size: of the model; masks have as many bits, rounded up to whole words.
        eos_token_ids: what a grammar allows where the text may end.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        config: CompilerConfig | None = None,
    ) -> None:
        self.config = config or CompilerConfig()
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._text = tokenizer
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.config.threads, thread_name_prefix="grammar")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled: Cache[bytes, Future[LLMatcher]] = Cache(self.config.cached)
        self._verdicts: Cache[bytes, tuple[GrammarError | None]] = Cache(_KEPT_VERDICTS)

    def warm_up(self) -> None:
        """Begins to build what all grammars share, which for a large vocabulary takes a second."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._pool.submit(self._build_tokenizer)

    def _build_tokenizer(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token to end a text with")
        try:
            return self._llguidance_tokenizer()
        except ValueError as error:
            raise GrammarError(
                f"the model's tokenizer is of a kind that grammars cannot be used with: {error}"
            ) from None

    def _llguidance_tokenizer(self) -> LLTokenizer:
        text, ends = self._text(), list(self.eos_token_ids)
        try:
            return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=ends, slices=_SLICES)
        except ValueError:  # it may know more tokens than the model
            return LLTokenizer(text, eos_token=ends, slices=_SLICES)

    @property
    def tokenizer_vocab(self) -> int:
        """The tokenizer's size, once something was compiled."""
        return 0 if self._tokenizer is None else self._tokenizer.result().vocab_size

    # -- compiling -----------------------------------------------------------------------------

    def check(self, params: StructuredOutputsParams) -> None:
        """Waits until it is known that a grammar can be compiled.

        Raises:
            GrammarError: it cannot, or takes too long.
        """
        try:
            self.checked(params).result(self.config.timeout)
        except TimeoutError:
            raise self.too_slow() from None

    def checked(self, params: StructuredOutputsParams) -> Future[None]:
        """Done when it is known; may raise GrammarError, as this may."""
        key, verdict = _key(params), Future[None]()

        def judge(done: Future[LLMatcher]) -> None:
            error = done.exception() if not done.cancelled() else None
            if error is None or isinstance(error, GrammarError):
                with self._lock:
                    self._verdicts.put(key, (error,))
            _settle(verdict, error)

        with self._lock:
            known = self._verdicts.get(key)
        if known is None:
            self.compile(params).add_done_callback(judge)
        else:
            _settle(verdict, known[0])
        return verdict

    def too_slow(self) -> GrammarError:
        return GrammarError(
            f"The grammar took longer than {self.config.timeout:g} seconds to compile.",
            code="grammar_timeout",
        )

    def compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """The grammar at its start, which others may be given too: `deep_copy` it before use. The
        future may raise GrammarError."""
        self.warm_up()
        key = _key(params)
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                found = self._pool.submit(self._compile, params)
                self._compiled.put(key, found)
        return found

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        try:
            return self._compiled_now(params)
        except Exception as error:
            with self._lock:
                self._compiled.discard(_key(params))
            if isinstance(error, GrammarError):
                raise
            raise GrammarError(f"It cannot be compiled ({type(error).__name__}).") from error

    def _compiled_now(self, params: StructuredOutputsParams) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError("the tokenizer was not loaded")
        matcher = LLMatcher(
            self._tokenizer.result(), compilable(params), log_level=0, limits=_LIMITS
        )
        if not matcher.is_error():
            # The first mask is the dearest, and copies share what was found for it.
            matcher.compute_bitmask()
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        if matcher.is_error() or warnings:
            reason = "; ".join(warnings) or matcher.get_error()
            raise GrammarError(f"The grammar cannot be enforced: {reason[:500]}")
        return matcher

    def shutdown(self) -> None:
        """Does not wait for what is being compiled. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _key(params: StructuredOutputsParams) -> bytes:
    try:
        return hashlib.blake2b(msgspec.msgpack.encode(params), digest_size=32).digest()
    except UnicodeEncodeError:
        raise GrammarError("It holds half of a surrogate pair, which is no character.") from None


def _settle(verdict: Future[None], error: BaseException | None) -> None:
    if isinstance(error, GrammarError):
        # Anew: a traceback grows with every raise.
        error = GrammarError(str(error), error.param, error.code, error.pointer)
    if not verdict.set_running_or_notify_cancel():
        return
    if error is None:
        verdict.set_result(None)
    else:
        verdict.set_exception(error)
