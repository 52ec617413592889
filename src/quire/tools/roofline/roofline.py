"""Predictions of a case's time from a model's shapes and a card's ceilings, before anything runs.

A kind of kernel takes hypot(bytes / bandwidth, FLOPs / matmul rate) and a fixed time for each of
its launches; a step is the sum of its kinds. docs/roofline.md has the formulas, the source of the
constants and the errors.
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
from quire.tools.bench.work import Ceilings, ceilings, measured_on_cpu

MAX_REQUESTS = 256
MAX_TOKENS = 8192
"""Requests and tokens of a step, as on a GPU by default."""

_LAUNCH = 1.9e-6
"""Seconds from one kernel of a graph to the next."""
_WIDE_LAUNCH = 5e-6
"""Seconds more that a product over more than `_FEW_ROWS` rows takes to fill and drain its tiles."""
_FEW_ROWS = 16
_HOST = 1.3e-3
"""Seconds of the host before the first step of requests that come at once."""
_STEP = 30e-6
"""Seconds of a step in which none of the kernels below runs."""
_RATES = {"attention": 0.65, "experts": 0.28, "states": 0.16}
"""Shares of the rate of products that kinds of kernels reach over a prompt."""
_FEW_BITS = ((12.0, 1.0), (0.0, 0.80))
"""(bits of a weight, share of the bandwidth that products reach above as many bits)."""
_EXPERTS = ((12.0, 0.85), (6.0, 0.70), (0.0, 0.65))
"""Likewise, of experts."""
_STATES = 0.62
"""Share of the bandwidth at which recurrent states are read and written."""
_LINK = 320e9
"""Bytes/s that a GPU sends over NVLink in a sum over two H200, in sums of 2048 rows."""
_ONE_SHOT = 1 << 20
"""Bytes of a tensor up to which every rank sends all of it to all others, with a mark beside each
word of it."""
_RANK = 1.4e-6
"""Seconds that each rank beyond two adds to a sum, on four H200."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its short name. `memory`: bytes. `linked`: whether NVLink joins several."""

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
        bytes_seconds, flops_seconds: by the ceilings alone. launch_seconds: of its launches.
        seconds: predicted.
    """

    bytes_seconds: float = 0.0
    flops_seconds: float = 0.0
    launch_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def bound(self) -> str:
        """The largest part: bytes, FLOPs or launches; host where there is none of them."""
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
        decode_seconds: mean of the steps that only decode; None without such steps.
        first_token_seconds: time to the first token of the request that is served last.
        kv_bytes: the most KV that all requests hold together.
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
    """One model on cards of one kind. card: a name of `CARDS`, or CPU: this machine's, whose
    ceilings are measured.

    Raises:
        ConfigError: the card is unknown or has no link to others.
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
                f"no ceilings are known of {self.card.name} in {config.dtype}", "dtype"
            )
        self.limits: Ceilings = found
        self._read_spec(config)
        self.work = model_work(config)
        experts = self.work.experts
        self.bandwidth_shares = {
            "projections": _share(_FEW_BITS, self.work.body_bytes, self.work.body_flops),
            "head": _share(_FEW_BITS, self.work.head_bytes, self.work.head_flops),
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
        """Returns the case's prediction; of `ttft`, one for each length of prompt.

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
        """Returns the prediction of requests that come at once."""
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
        # A norm reads and writes the residual stream, and writes what comes out.
        parts["norms"] = (2 * self.layers * 3 * hidden, 0.0)
        seconds = kinds.setdefault("between steps", KindTime()).add(0.0, 0.0, _STEP)
        for name, (bytes_, flops) in parts.items():
            launch, launches = _LAUNCH, self.launches.get(name, 1)
            bandwidth = self.limits.memory * self.bandwidth_shares.get(name, 1.0)
            rate = self.limits.matmul * _RATES.get(name, 1.0)
            rows = step.logit_rows if name == "head" else tokens
            if name in ("projections", "head", "experts") and rows > _FEW_ROWS:
                launch += _WIDE_LAUNCH
            kind = kinds.setdefault(name, KindTime())
            seconds += kind.add(bytes_ / bandwidth, flops / rate, launches * launch)
        if self.world > 1:
            wait = 2 * _LAUNCH + _RANK * (self.world - 2)
            sent = 2 * (self.world - 1) * hidden / _LINK
            # Each rank sends all to all others, or a share of the sum to each in a second round.
            shared = sent / self.world
            sending = shared if hidden > _ONE_SHOT else min(sent, shared + 2 * _LAUNCH)
            kind = kinds.setdefault("collectives", KindTime())
            seconds += kind.add(2 * self.layers * sending, 0.0, 2 * self.layers * wait)
        return seconds


def _share(shares: Sequence[tuple[float, float]], bytes_: float, flops: float) -> float:
    """Returns the share of the bandwidth that products with weights of so many bytes reach."""
    bits = 8 * 2 * bytes_ / flops
    return next(share for least, share in shares if bits > least)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step. `first`, `count`: int32 [R], as `ModelWork.of_step` takes them.

    Attributes:
        held: tokens whose KV all requests hold after it.
        first_tokens: requests that get their first token.
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
    """Yields the steps of requests that come at once, with room for all of their KV: running
    requests first, then prompts in order, in chunks, under the budgets of a step."""
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
