"""Compiled grammars for one tokenizer, kept for those who ask again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.config import EngineConfig
from quire.errors import CompilerBusyError, ConfigError, GrammarError
from quire.features.structured_output.mask_memory import MaskMemory
from quire.features.structured_output.string_tables import StringTables
from quire.features.structured_output.string_walk import StringPlaces, StringWalk, string_places
from quire.grammar.grammar import compilable
from quire.sampling_params import StructuredOutputsParams
from quire.text import tokenizer_files

K = TypeVar("K")
V = TypeVar("V")

# Work, not time: the same grammar is fit or not on every machine. Some seconds at the very most.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    # A mask that needs more ends the answer. Patterns that could are refused (`patterns.MAX_WAYS`).
    step_lexer_fuel=8_000_000,
    step_max_items=100_000,
    max_lexer_states=1_000_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
_MOST_GIVEN_UP = 8
"""Grammars that took too long and still run, from which on no more threads are added."""

_CHAR = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHAR}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 16, 30)),
    "[A-Za-z0-9]+",
    f"{_CHAR}+",
]
"""Tokens that are allowed or not together, in a mask built from a few parts: text within a string,
by length, and words, of which addresses consist. Without those of few characters, strings of a
bounded length would cost a third more."""


@dataclass(frozen=True, kw_only=True)
class CompilerConfig:
    """Limits of a compiler.

    Attributes:
        timeout: Seconds for one grammar, waiting included.
        cached: Compiled grammars to keep.
        threads: Number of grammars that are compiled at once.
        walks: Whether `walk` is called.
        memory_bytes: Bytes of masks to keep for grammars that come again.
    """

    timeout: float = 5.0
    cached: int = 128
    threads: int = max(2, min(8, (os.cpu_count() or 2) // 2))
    walks: bool = False
    memory_bytes: int = 0


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

    def values(self) -> Iterable[V]:
        return self._values.values()

    def __len__(self) -> int:
        return len(self._values)


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that is being compiled, or waits to be.

    Attributes:
        future: the compiled grammar.
        waiters: requests that need it.
        began: moment at which a thread took it up.
        given_up: whether its thread is no longer counted on.
    """

    future: Future[LLMatcher] = field(init=False)
    waiters: int = 0
    began: float | None = None
    given_up: bool = False


class Compiler:
    """Compiles on threads of its own, each grammar once for all who ask. Thread-safe.

    A grammar that waits for a thread, and that nobody waits for any more, is not compiled.

    Args:
        tokenizer: gives the text of a `tokenizer.json`. Called once, on a thread.
        vocab_size: of the model; masks have as many bits, rounded up to whole words.
        eos_token_ids: what a grammar allows where the text may end.

    Attributes:
        compiles: Number of grammars compiled.
        compile_seconds: Seconds of CPU that threads spent on them.
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
        """Compiled grammars, and those that were refused."""
        self._alive: WeakValueDictionary[bytes, Future[LLMatcher]] = WeakValueDictionary()
        """All that somebody holds. A grammar in use is found when others have displaced it."""
        self._places: Cache[bytes, StringPlaces] = Cache(self.config.cached)
        # A thread of its own: it waits for the tokenizer, and grammars must not wait for it.
        self._table_pool = ThreadPoolExecutor(1, thread_name_prefix="string tables")
        self._tables: Future[StringTables] | None = None
        self._jobs: dict[bytes, _Compilation] = {}
        self.memory = MaskMemory(self.config.memory_bytes) if self.config.memory_bytes else None
        self.compiles = 0
        self.compile_seconds = 0.0

    def warm_up(self) -> None:
        """Begins to build what all grammars share, which for a large vocabulary takes a second."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._pool.submit(self._build_tokenizer)
                if self.config.walks:
                    self._tables = self._table_pool.submit(_string_tables, self._tokenizer)

    def load(self) -> None:
        """Builds what all grammars share, on this thread: processes that fork then share it."""
        self._tokenizer, self._tables = Future(), Future()
        try:
            tokenizer = self._build_tokenizer()
            self._tokenizer.set_result(tokenizer)
            self._tables.set_result(StringTables(tokenizer))
        except Exception as error:
            for future in (self._tokenizer, self._tables):
                if not future.done():
                    future.set_exception(error)

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
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer that all grammars share. Waits until it is built."""
        self.warm_up()
        assert self._tokenizer is not None
        return self._tokenizer.result()

    @property
    def tokenizer_vocab(self) -> int:
        """The tokenizer's size, once something was compiled; 0 where grammars cannot be used with
        it."""
        made = self._tokenizer
        return 0 if made is None or made.exception() is not None else made.result().vocab_size

    # -- compiling -----------------------------------------------------------------------------

    def late(self, params: StructuredOutputsParams) -> GrammarError | CompilerBusyError:
        """Returns the error of a request that has waited for `timeout` seconds.

        The grammar is to blame if it was being compiled for most of the time, else other grammars.
        """
        limit = self.config.timeout
        with self._lock:
            job = self._jobs.get(grammar_key(params))
            began = None if job is None else job.began
            self._give_up()
        if began is not None and time.monotonic() - began >= limit / 2:
            return GrammarError(
                f"The grammar took longer than {limit:g} seconds to compile.",
                code="grammar_timeout",
            )
        return CompilerBusyError(
            f"Other grammars have kept this one waiting for {limit:g} seconds; try again later."
        )

    def _give_up(self) -> None:
        """Compiles what comes next on other threads, if grammars that took too long still run.

        Nothing can stop them. The caller holds the lock.
        """
        now, limit = time.monotonic(), self.config.timeout
        late = [
            job
            for job in self._jobs.values()
            if job.began is not None and not job.given_up and now - job.began >= limit / 2
        ]
        given_up = sum(job.given_up for job in self._jobs.values())
        if not late or given_up >= _MOST_GIVEN_UP:
            return
        for job in late:
            job.given_up = True
        self._pool.shutdown(wait=False)
        self._pool = ThreadPoolExecutor(self.config.threads, thread_name_prefix="grammar")

    def compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """Returns the grammar at its start, which others may be given too.

        `deep_copy` it before use. The future may raise GrammarError. Who does not wait for it says
        so by `forget`.
        """
        self.warm_up()
        key = grammar_key(params)
        with self._lock:
            found = self._find(key)
            if found is not None:
                return found
            job = self._jobs.get(key)
            if job is None:
                # Its thread waits for the lock, so it sees the future.
                job = _Compilation()
                job.future = self._pool.submit(self._compile, key, job, params)
                job.future.add_done_callback(_drop_frames)
                self._jobs[key] = job
            job.waiters += 1
            return job.future

    def _find(self, key: bytes) -> Future[LLMatcher] | None:
        """Returns a compiled grammar, if it is kept or in use. The caller holds the lock."""
        return self._compiled.get(key) or self._alive.get(key)

    def _keep(self, key: bytes, compiled: Future[LLMatcher]) -> None:
        self._compiled.put(key, compiled)
        self._alive[key] = compiled

    def _count(self, seconds: float) -> None:
        with self._lock:
            self.compiles += 1
            self.compile_seconds += seconds

    def forget(self, params: StructuredOutputsParams) -> None:
        """Notes that one request has stopped waiting for a grammar."""
        key = grammar_key(params)
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                return
            job.waiters -= 1
            if job.waiters > 0 or job.began is not None:
                return
            del self._jobs[key]
        job.future.cancel()  # not under the lock, which its callbacks take

    def _compile(self, key: bytes, job: _Compilation, params: StructuredOutputsParams) -> LLMatcher:
        with self._lock:
            # Forgotten at this very moment. A later request may have a job of its own.
            if self._jobs.get(key) is not job:
                raise GrammarError("Nobody waits for the grammar.")
            job.began = time.monotonic()
        began = time.thread_time()
        try:
            return self._compiled_now(key, params)
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(f"It cannot be compiled ({type(error).__name__}).") from error
        finally:
            seconds = time.thread_time() - began
            self._count(seconds)
            with self._lock:
                del self._jobs[key]
                self._keep(key, job.future)

    def _compiled_now(self, key: bytes, params: StructuredOutputsParams) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError("the tokenizer was not loaded")
        grammar = compilable(params)
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask is the dearest, and copies share what was found for it.
            matcher.compute_bitmask()
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        if matcher.is_error() or warnings:
            reason = "; ".join(warnings) or matcher.get_error()
            raise GrammarError(f"The grammar cannot be enforced: {reason[:500]}")
        if self.config.walks and params.json is not None:
            places = string_places(json.loads(grammar)["grammars"][0]["json_schema"])
            with self._lock:
                self._places.put(key, places)
        return matcher

    def walk(self, params: StructuredOutputsParams, *, repeated: bool = False) -> StringWalk | None:
        """Returns what follows the strings of a document of a compiled grammar, from its start;
        None while tables are being made.

        Args:
            repeated: Whether masks are remembered, while that pays. Most grammars come once.
        """
        key = grammar_key(params)
        with self._lock:
            places, made = self._places.get(key), self._tables
        if places is None or made is None or not made.done() or made.exception() is not None:
            return None
        tables = made.result()
        if not tables.usable:
            return None
        use = self.memory.use(key) if self.memory is not None and repeated else None
        if use is None or not use.pays:
            return StringWalk(places, tables)
        return StringWalk(places, tables, self.memory, use)

    def shutdown(self) -> None:
        """Does not wait for what is being compiled. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._table_pool.shutdown(wait=False, cancel_futures=True)


def _drop_frames(compiled: Future[LLMatcher]) -> None:
    """Frees what a refused grammar's traceback holds: its text, and all that was read of it."""
    refusal = None if compiled.cancelled() else compiled.exception()
    if refusal is not None:
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None


def _string_tables(tokenizer: Future[LLTokenizer]) -> StringTables:
    return StringTables(tokenizer.result())


class CompilerSetup(msgspec.Struct, frozen=True):
    """The tokenizer and the limits of a compiler.

    Attributes:
        folder: The folder of the tokenizer.
        vocab_size: See `Compiler`.
        eos_token_ids: See `Compiler`.
        config: Its limits.
    """

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    config: CompilerConfig

    def open(self) -> Compiler:
        folder = Path(self.folder)
        return Compiler(
            lambda: tokenizer_files(folder)[0], self.vocab_size, self.eos_token_ids, self.config
        )


def compiler_setup(config: EngineConfig, *, walks: bool = False, parts: int = 1) -> CompilerSetup:
    """Returns how a compiler for the model's vocabulary is made.

    Args:
        walks: Whether `Compiler.walk` is called.
        parts: Number of compilers that share the memory of masks.

    Raises:
        ConfigError: the engine has no tokenizer.
    """
    if config.tokenizer_path is None:
        raise ConfigError("grammars need a tokenizer", "skip_tokenizer_init")
    limits = CompilerConfig(
        timeout=config.args.structured_outputs_timeout,
        cached=config.args.structured_outputs_cache,
        walks=walks,
        memory_bytes=int(1e6 * config.args.structured_outputs_memory_mb / parts) if walks else 0,
    )
    eos = tuple(config.eos_token_ids)
    return CompilerSetup(str(config.tokenizer_path), config.vocab_size, eos, limits)


def build_compiler(config: EngineConfig) -> Compiler:
    """Returns a compiler for the model's vocabulary, which begins with what all grammars share.

    Raises:
        ConfigError: the engine has no tokenizer.
    """
    compiler = compiler_setup(config).open()
    compiler.warm_up()
    return compiler


def grammar_key(params: StructuredOutputsParams) -> bytes:
    """Returns what names a grammar.

    Raises:
        GrammarError: it holds what is no text.
    """
    try:
        return hashlib.blake2b(msgspec.msgpack.encode(params), digest_size=32).digest()
    except UnicodeEncodeError:
        raise GrammarError("It holds half of a surrogate pair, which is no character.") from None
