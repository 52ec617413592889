"""Predicts a case's time from a model's shapes and a card's ceilings, without running it.

A kind of kernel takes hypot(bytes / bandwidth, FLOPs / matmul rate), plus a fixed time for each
launch. A step's time is the sum over its kinds. docs/roofline.md has the formulas, the source of
the constants and the errors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models import load_config, spec_from_config
from quire.tools.bench.cases import TTFT, TTFT_LENGTHS, Case
from quire.tools.bench.model_work import model_work
from quire.tools.bench.record import card_name
from quire.tools.bench.work import Ceilings, Products, ceilings, measured_on_cpu

MAX_REQUESTS = 256
MAX_TOKENS = 8192
"""Default limits for the requests and the tokens of a step on a GPU."""

_LAUNCH = 1.9e-6
"""Seconds between two kernels of a graph."""
_WIDE_LAUNCH = 5e-6
"""Seconds to fill and drain the tiles of a product of more than `_FEW_ROWS` rows."""
_FEW_ROWS = 16
_HOST = 1.3e-3
"""Seconds that the host needs before the first step of requests that arrive at once."""
_STEP = 30e-6
"""Seconds of a step without any of the kernels below."""
_RATES = {"attention": 0.65, "experts": 0.28, "states": 0.16}
"""Fractions of the matmul rate that kinds of kernels reach over a prompt."""
_EXPERTS = ((12.0, 0.85), (6.0, 0.70), (0.0, 0.65))
"""Pairs of bits of an expert's weight and the fraction of the bandwidth that products with more
bits reach."""
_STATES = 0.62
"""Fraction of the bandwidth at which recurrent states are read and written."""
_LINK = 320e9
"""Bytes per second that a GPU sends over NVLink in sums of 2048 rows over two H200."""
_ONE_SHOT = 1 << 20
"""Up to this many bytes every rank sends its whole tensor to all others, with a mark next to each
word."""
_RANK = 1.4e-6
"""Seconds that each rank beyond two adds to a sum, on four H200."""


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """The speed of products.

    Attributes:
        bandwidth: fraction of the bandwidth.
        rate: factor of the matmul rate of 16 bits, for numbers of rows in `rows`.
        rows: tokens.
    """

    bandwidth: float = 1.0
    rate: float = 1.0
    rows: range = range(1, 1 << 30)


_WIDENED_ROWS = range(9, 257)
"""Tokens for which tensor cores wait until weights are widened. For fewer tokens weights take
longer to arrive, and for more they are widened once for many tokens."""
_PRODUCTS: dict[Products, ProductSpeed] = {
    "plain": ProductSpeed(),
    "integers": ProductSpeed(0.97, 0.6, _WIDENED_ROWS),
    "floats": ProductSpeed(0.84, 0.6, _WIDENED_ROWS),
    "rounded": ProductSpeed(0.80, 1.65),
    "blocks": ProductSpeed(0.84, 1.15),
}


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU.

    Attributes:
        name: the name that PyTorch reports.
        memory: bytes.
        linked: whether NVLink connects several of them.
    """

    name: str
    memory: float
    linked: bool = True


CARDS = {
    "h200": Card("NVIDIA H200", 141e9),
    "h100": Card("NVIDIA H100 80GB HBM3", 80e9),
    "b200": Card("NVIDIA B200", 180e9),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80e9),
    "l40s": Card("NVIDIA L40S", 48e9, linked=False),
    "l4": Card("NVIDIA L4", 24e9, linked=False),
}


CPU = "cpu"
"""Name of the card that is this machine's CPU."""


def this_cpu() -> Card:
    """Returns this machine's CPU, with all of its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Card(card_name(CPU), float(memory), linked=False)


def _card(name: str) -> Card:
    if name not in CARDS:
        raise ConfigError(
            f"unknown card {name!r}; expected one of: {', '.join(CARDS)}, {CPU}", "card"
        )
    return CARDS[name]


@dataclass(slots=True)
class KindTime:
    """Time of one kind of kernel, over a whole run.

    Attributes:
        bytes_seconds: time for its bytes at the bandwidth's ceiling.
        flops_seconds: time for its FLOPs at the matmul rate's ceiling.
        launch_seconds: time for its launches.
        seconds: predicted time.
    """

    bytes_seconds: float = 0.0
    flops_seconds: float = 0.0
    launch_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def bound(self) -> str:
        """The largest part: "bytes", "FLOPs" or "launches", or "host" if all are 0."""
        parts = {
            "bytes": self.bytes_seconds,
            "FLOPs": self.flops_seconds,
            "launches": self.launch_seconds,
        }
        return max(parts, key=parts.__getitem__) if any(parts.values()) else "host"

    def add(self, bytes_seconds: float, flops_seconds: float, launch_seconds: float) -> float:
        """Adds the kernels of a step. Returns their time."""
        seconds = math.hypot(bytes_seconds, flops_seconds) + launch_seconds
        self.bytes_seconds += bytes_seconds
        self.flops_seconds += flops_seconds
        self.launch_seconds += launch_seconds
        self.seconds += seconds
        return seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of a case. Memory is in bytes, of one rank.

    Attributes:
        case: name of the case.
        seconds: time of the whole case.
        steps: number of steps.
        output_tok_s: output tokens per second.
        decode_seconds: mean time of the steps that only decode; None without such steps.
        first_token_seconds: time until every request has its first token.
        weight_bytes: bytes of the weights.
        kv_bytes: the most KV that all requests hold together.
        kinds: time of each kind of kernel.
    """

    case: str
    seconds: float
    steps: int
    output_tok_s: float
    decode_seconds: float | None
    first_token_seconds: float
    weight_bytes: int
    kv_bytes: int
    kinds: dict[str, KindTime]


class Roofline:
    """One model on cards of one kind.

    Args:
        config: the model and its settings.
        card: a name in `CARDS`, or `CPU` for this machine's CPU, whose ceilings are measured.

    Raises:
        ConfigError: the card is unknown, or several ranks need a link that it does not have.
    """

    def __init__(self, config: EngineConfig, card: str) -> None:
        self.world = config.args.tensor_parallel_size
        self.card = this_cpu() if card == CPU else _card(card)
        if self.world > 1 and not self.card.linked:
            raise ConfigError(f"no link between several {self.card.name} is known", "card")
        if card == CPU:
            found: Ceilings | None = measured_on_cpu(config.dtype)
        else:
            found = ceilings(self.card.name, config.dtype)
        if found is None:
            raise ConfigError(
                f"the ceilings of {self.card.name} in {config.dtype} are unknown", "dtype"
            )
        self.limits: Ceilings = found
        self._read_spec(config)
        self.work = model_work(config)
        experts = self.work.experts
        self.products = {
            "projections": _PRODUCTS[self.work.body_products],
            "head": _PRODUCTS[self.work.head_products],
        }
        self.bandwidth_shares = {
            **{name: speed.bandwidth for name, speed in self.products.items()},
            "states": _STATES,
        }
        if experts.layers:
            flops = experts.flops / experts.share
            self.bandwidth_shares["experts"] = _share(_EXPERTS, experts.bytes, flops)
        self.launches = {
            "projections": self.work.linear_layers,
            "attention": 2 * self.work.attention_layers,
            "norms": 2 * self.layers,
            "experts": 3 * experts.layers,
            "states": 3 * self.work.state_layers,
        }

    def _read_spec(self, config: EngineConfig) -> None:
        itemsize = getattr(torch, config.dtype).itemsize
        spec = spec_from_config(load_config(config.model_path))
        self.layers = len(spec.layers)
        self.vocab = spec.vocab_size
        rows = spec.vocab_size // self.world
        self.embedding_bytes = rows * spec.hidden_size * itemsize
        self.max_positions = spec.max_positions

    @property
    def weight_bytes(self) -> int:
        """Bytes of a rank's weights."""
        work = self.work
        table = 0 if work.tied else self.embedding_bytes
        return work.body_bytes + work.experts.bytes + work.head_bytes + table

    def case(self, case: Case) -> list[Prediction]:
        """Returns the prediction for a case. For `ttft` it returns one for each length of prompt.

        Raises:
            ConfigError: the case is longer than the model's context.
        """
        if case is TTFT:
            lengths = [length for length in TTFT_LENGTHS if length < self.max_positions]
            return [self.run(f"ttft {length}", [length], [1]) for length in lengths]
        if case.positions() > self.max_positions:
            raise ConfigError(
                f"case {case.name} needs sequences of {case.positions()} tokens, but the model "
                f"takes {self.max_positions}",
                "case",
            )
        return [self.run(case.name, *case.lengths(self.vocab))]

    def run(self, name: str, prompts: Sequence[int], outputs: Sequence[int]) -> Prediction:
        """Returns the prediction for requests that arrive at once."""
        kinds = {"host": KindTime(seconds=_HOST)}
        now, decode, steps, last_first, held = _HOST, [], 0, 0.0, 0
        for step in schedule(prompts, outputs):
            seconds = self._step(kinds, step)
            now += seconds
            steps += 1
            held = max(held, step.held)
            if step.decodes:
                decode.append(seconds)
            if step.first_tokens:
                last_first = now
        return Prediction(
            case=name,
            seconds=now,
            steps=steps,
            output_tok_s=sum(outputs) / now,
            decode_seconds=float(np.mean(decode)) if decode else None,
            first_token_seconds=last_first,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.work.held_bytes(held, len(prompts)),
            kinds=kinds,
        )

    def _step(self, kinds: dict[str, KindTime], step: ScheduledStep) -> float:
        """Adds a step's time to its kinds. Returns it."""
        tokens = int(step.count.sum())
        parts = self.work.parts_of_step(step.first, step.count, step.logit_rows)
        hidden = tokens * self.work.embedding_bytes
        # A norm reads and writes the residual stream, and writes its result.
        parts["norms"] = (2 * self.layers * 3 * hidden, 0.0)
        seconds = kinds.setdefault("between steps", KindTime()).add(0.0, 0.0, _STEP)
        for name, (bytes_, flops) in parts.items():
            launch, launches = _LAUNCH, self.launches.get(name, 1)
            bandwidth = self.limits.memory * self.bandwidth_shares.get(name, 1.0)
            rate = self.limits.matmul * _RATES.get(name, 1.0)
            rows = step.logit_rows if name == "head" else tokens
            speed = self.products.get(name)
            if speed is not None and rows in speed.rows:
                rate *= speed.rate
            if name in ("projections", "head", "experts") and rows > _FEW_ROWS:
                launch += _WIDE_LAUNCH
            kind = kinds.setdefault(name, KindTime())
            seconds += kind.add(bytes_ / bandwidth, flops / rate, launches * launch)
        if self.world > 1:
            wait = 2 * _LAUNCH + _RANK * (self.world - 2)
            sent = 2 * (self.world - 1) * hidden / _LINK
            # Each rank sends its whole tensor to all others. For large tensors it sends shares, and
            # in a second round a share of the sum.
            shared = sent / self.world
            sending = shared if hidden > _ONE_SHOT else min(sent, shared + 2 * _LAUNCH)
            kind = kinds.setdefault("collectives", KindTime())
            seconds += kind.add(2 * self.layers * sending, 0.0, 2 * self.layers * wait)
        return seconds


def _share(shares: Sequence[tuple[float, float]], bytes_: float, flops: float) -> float:
    """Returns the fraction of the bandwidth that products with weights of this size reach."""
    bits = 8 * 2 * bytes_ / flops
    return next(share for least, share in shares if bits > least)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step.

    Attributes:
        first: see `ModelWork.of_step`.
        count: see `ModelWork.of_step`.
        logit_rows: number of rows of logits.
        held: number of tokens whose KV all requests hold after the step.
        first_tokens: number of requests that get their first token.
    """

    first: Int32
    count: Int32
    logit_rows: int
    held: int
    first_tokens: int

    @property
    def decodes(self) -> bool:
        return bool((self.count == 1).all()) and not self.first_tokens


def schedule(prompts: Sequence[int], outputs: Sequence[int]) -> Iterator[ScheduledStep]:
    """Yields the steps of requests that arrive at once, if all of their KV fits.

    A step first takes running requests, then prompts in order, in chunks, up to the limits."""
    prompt, total = np.array(prompts), np.array(prompts) + np.array(outputs) - 1
    done = np.zeros(len(prompt), dtype=np.int64)
    while True:
        open_ = np.flatnonzero(done < total)[:MAX_REQUESTS]
        if not len(open_):
            return
        wanted = np.where(done[open_] < prompt[open_], prompt[open_] - done[open_], 1)
        order = np.argsort(wanted > 1, kind="stable")
        rows, wanted = open_[order], wanted[order]
        before = np.cumsum(wanted) - wanted
        count = np.clip(MAX_TOKENS - before, 0, wanted)
        rows, count = rows[count > 0], count[count > 0]
        first = done[rows].astype(np.int32)
        done[rows] += count
        ended = done[rows] >= prompt[rows]
        yield ScheduledStep(
            first,
            count.astype(np.int32),
            int(ended.sum()),
            int(done[open_].sum()),
            int((ended & (first < prompt[rows])).sum()),
        )
