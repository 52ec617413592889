"""Measures a model's perplexity over a text, and its divergence from another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quire.arrays import Int32
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.engine.loop.core import EngineCore
from quire.engine.loop.embedding import NO_TOKENS
from quire.errors import BrokenLogitsError, ConfigError, RequestError
from quire.executor import OnProgress
from quire.models import Decoder
from quire.runner import ModelRunner
from quire.scheduler import Order
from quire.text.tokenizer import Tokenizer
from quire.tools.evaluate.hook import Base, TokenScores
from quire.tools.evaluate.text import Window, check_vocabulary, read_text, windows_of

WINDOW = 2048
"""Tokens of a window, unless the model's context is shorter."""
_CHARACTERS = 16
"""Characters of a text that are read per token, more than a token has on average."""

Progress = Callable[[int, int], None]
"""Called with the number of windows that are done and the number of all windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """The quality of a model's predictions of a text.

    Attributes:
        tokens: number of predicted tokens.
        bytes: bytes of their text.
        nats: mean negative log-probability of a token.
        kl: mean Kullback-Leibler divergence of the base's distribution from the model's, in nats.
            None without a base.
        base: the result of the base. None without a base.
    """

    tokens: int
    bytes: int
    nats: float
    kl: float | None = None
    base: Perplexity | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        return self.nats * self.tokens / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as a JSON object."""
        found: dict[str, Any] = {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats": self.nats,
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity,
        }
        if self.base is None or self.kl is None:
            return found
        change = 100 * (self.perplexity / self.base.perplexity - 1)
        about = {"kl": self.kl, "change_percent": change}
        base = {
            "nats": self.base.nats,
            "bits_per_byte": self.base.bits_per_byte,
            "perplexity": self.base.perplexity,
        }
        return {**found, **about, "base": base}


def measure_perplexity(
    args: EngineArgs,
    data: Path,
    *,
    base: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    on_start: OnProgress | None = None,
    on_window: Progress | None = None,
) -> Perplexity:
    """Computes the perplexity of the model that `args` describe over a text.

    Args:
        data: file of the text.
        base: a model to compare with, in its checkpoint's own format. All other settings are equal.
        window: tokens that the model reads at once; by default 2048, or its context if shorter.
        stride: tokens from the start of a window to the next; by default `window`. A smaller stride
            gives tokens more context, and takes longer.
        limit: tokens of the text to read; by default all.
        on_start: called with the progress of each engine's start.
        on_window: called after each window, see `Progress`.

    Raises:
        ConfigError: a setting is invalid, the text is empty or too short, or the base has a
            different tokenizer.
        ModelError: a model cannot be loaded.
        BrokenLogitsError: the model's output is NaN.
    """
    text = read_text(data)
    config = _resolve(args)
    longest = config.scheduler.max_model_len
    size = min(WINDOW, longest) if window is None else window
    if size > longest:
        raise ConfigError(f"window={size}, but the model takes {longest} tokens", "window")
    tokenizer = _tokenizer(config)
    tokens = _tokens(tokenizer, text, limit)
    check_vocabulary(tokens, config.vocab_size)
    windows = windows_of(tokens, size, size if stride is None else stride)
    of_base = None if base is None else _resolve(_as_stored(args, base))
    if of_base is not None:
        _check_base(of_base, config, text, limit, tokens, size)
    total = len(windows) * (1 if of_base is None else 2)
    counted = sum(
        len(tokenizer.token_bytes(int(token)))
        for each in windows
        for token in each.tokens[each.first :]
    )
    reference, of_reference, done = None, None, 0
    if of_base is not None:
        first = TokenScores(windows, None, keep=True)
        model = _run(of_base, windows, first, on_start, _part(on_window, 0, total))
        if first.states is not None:
            reference = Base(model, first.states)
        of_reference, done = _result(first, counted), len(windows)
    scores = TokenScores(windows, reference, keep=False)
    _run(config, windows, scores, on_start, _part(on_window, done, total))
    return _result(scores, counted, of_reference)


def _result(scores: TokenScores, bytes: int, base: Perplexity | None = None) -> Perplexity:
    """Returns the result. Raises BrokenLogitsError if a score is NaN."""
    kl = None if scores.divergence is None else _mean(scores.divergence)
    nats = _mean(scores.nats)
    return Perplexity(tokens=len(scores.nats), bytes=bytes, nats=nats, kl=kl, base=base)


def _mean(scores: Tensor) -> float:
    mean = scores.double().mean().item()
    if not math.isfinite(mean):
        raise BrokenLogitsError
    return mean


def _resolve(args: EngineArgs) -> EngineConfig:
    if args.ranks > 1:
        name = "tensor" if args.tensor_parallel_size > 1 else "pipeline"
        raise ConfigError("perplexity is measured on one rank", f"{name}_parallel_size")
    # Each window is computed as a whole, so cached blocks of earlier windows must not be used.
    return resolve(replace(args, enable_prefix_caching=False, enforce_eager=True))


def _as_stored(args: EngineArgs, model: str) -> EngineArgs:
    return replace(
        args, model=model, revision=None, tokenizer=None, quantization=None, kv_cache_dtype="auto"
    )


def _tokenizer(config: EngineConfig) -> Tokenizer:
    if config.tokenizer_path is None:
        raise ConfigError("perplexity needs the model's tokenizer", "skip_tokenizer_init")
    return Tokenizer.from_path(config.tokenizer_path)


def _tokens(tokenizer: Tokenizer, text: str, limit: int | None) -> Int32:
    if limit is None:
        return tokenizer.encode(text)
    if limit < 2:
        raise ConfigError("limit must be at least 2 tokens", "limit")
    return tokenizer.encode(text[: _CHARACTERS * limit])[:limit]


def _check_base(
    base: EngineConfig, own: EngineConfig, text: str, limit: int | None, tokens: Int32, size: int
) -> None:
    same = base.vocab_size == own.vocab_size and np.array_equal(
        _tokens(_tokenizer(base), text, limit), tokens
    )
    if not same:
        raise ConfigError(f"{base.model_name} has a different tokenizer from the model's", "base")
    if size > base.scheduler.max_model_len:
        raise ConfigError(
            f"window={size}, but the base takes {base.scheduler.max_model_len} tokens",
            "window",
        )


def _part(told: Progress | None, done: int, total: int) -> Progress | None:
    return None if told is None else lambda count, _: told(done + count, total)


def _run(
    config: EngineConfig,
    windows: Sequence[Window],
    hook: TokenScores,
    on_start: OnProgress | None,
    on_window: Progress | None,
) -> Decoder:
    """Computes all windows in an engine. Shuts the engine down and returns its model."""
    runner = ModelRunner(config, on_start, [hook])
    core = EngineCore(config, runner, order=Order(config.scheduler))
    model = runner.model
    hook.attach(model)
    done = added = 0
    try:
        while done < len(windows):
            while added < min(len(windows), done + config.scheduler.max_num_seqs):
                # The last token is predicted, but not read.
                prompt = windows[added].tokens[:-1]
                core.add(str(added), prompt, NO_TOKENS, max_total=len(prompt) + 1)
                added += 1
            progress = core.step()
            if progress is None:
                raise RequestError("the cache has no room for a window", "window")
            done += len(progress.finished)
            if on_window is not None:
                on_window(done, len(windows))
    finally:
        core.shutdown()
    return model
