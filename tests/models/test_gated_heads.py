"""Steps whose heads wait for masks, in eager mode and with graphs, replayed by a CPU stand-in.

Masks depend only on the request and the position, so every mode must give the same tokens.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.arrays import Int32
from quire.plan import RowFlag
from quire.request import Request
from quire.runner import ModelRunner
from quire.runner.graphs import Buckets, Graphs
from quire.runner.hooks import Level
from quire.runner.hooks.mask import Mask
from quire.runner.program import BodyShape, HeadShape
from quire.runner.state import Limits
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder
from tests.tiny_engine import TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PARAMS = [
    SamplingParams(**GREEDY),  # type: ignore[arg-type]
    SamplingParams(max_tokens=24, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=9, top_k=9, top_p=0.9, temperature=0.8, ignore_eos=True),
    SamplingParams(max_tokens=9, presence_penalty=1.0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=9, logprobs=2, logit_bias={9: 4.0}, ignore_eos=True),
    SamplingParams(max_tokens=9, n=2, min_tokens=3, stop_token_ids=tuple(range(60, 70))),
    SamplingParams(max_tokens=9, prompt_logprobs=1, ignore_eos=True),
]


WAYS = [
    pytest.param(False, id="op by op"),
    pytest.param(True, id="graphs", marks=pytest.mark.slow),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"depth": 2},
    "late": {"depth": 3, "late": 0.7, "budget": 20},
    "preempted": {"depth": 2, "late": 0.5, "blocks": 8, "lanes": 6},
}


def mask_of(name: str, length: int) -> Int32:
    """Returns the mask of tokens that may follow the first `length`: about one in three."""
    draw = np.random.default_rng(zlib.crc32(f"{name}:{length}".encode()))
    allowed = draw.random(VOCAB) < 0.3
    allowed[7] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass
class Waiting:
    step_id: int
    requests: list[Request]
    lanes: Int32
    lane_epochs: list[int]
    needs: list[int]


class Gate(Feature):
    """Gates every other request."""

    def __init__(self) -> None:
        self.waiting: deque[Waiting] = deque()

    def plan(self, builder: PlanBuilder) -> None:
        rows = [
            row
            for row, request in enumerate(builder.requests)
            if int(request.request_id.partition("-")[0]) % 2 == 0
            and builder.flags[row] & RowFlag.SAMPLE
        ]
        if rows:
            builder.gate(rows)
            requests = [builder.requests[row] for row in rows]
            lane_epochs = [request.lane_epoch for request in requests]
            needs = [request.planned for request in requests]
            self.waiting.append(
                Waiting(builder.step_id, requests, builder.lanes[rows], lane_epochs, needs)
            )

    def inputs(self, step: Waiting) -> dict[int, Int32] | None:
        """Returns masks by lane, or None if not all tokens are known. Rows of freed lanes may have
        any mask."""
        masks = {}
        for request, lane, lane_epoch, need in zip(
            step.requests, step.lanes, step.lane_epochs, step.needs, strict=True
        ):
            alive = request.lane == lane and request.lane_epoch == lane_epoch
            if alive and request.known < need:
                return None
            masks[int(lane)] = mask_of(request.request_id, need)[None]
        return masks


class GatedEngine(TinyEngine):
    """Masks come late at random, so that steps are launched before them."""

    def __init__(self, folder: Path, *, late: float = 0.0, **options: Any) -> None:
        self.gate = Gate()
        super().__init__(folder, features=[self.gate], **{"budget": 40, **options})
        self._late = late
        self._random = random.Random(7)
        self.overtaken = 0

    def step(self) -> None:
        while self.scheduler.num_in_flight < self.depth:
            if self._random.random() >= self._late:
                self.release()
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.overtaken += any(w.step_id < plan.step_id for w in self.gate.waiting)
            self.plans.append(plan)
            self.executor.submit(plan)
        if self.scheduler.num_in_flight:
            self.release(self.plans[len(self.progress)].step_id)
            self.progress.append(self.scheduler.update(self.executor.collect()))

    def release(self, last: int | None = None) -> None:
        for step in list(self.gate.waiting):
            inputs = self.gate.inputs(step)
            if inputs is not None and (last is None or step.step_id <= last):
                self.submit_masks(step.step_id, inputs)
                self.gate.waiting.remove(step)


class Replays(Graphs):
    """A stand-in for graphs on a CPU: a replay runs the program again, with its padded sizes. A CPU
    program cannot wait for masks, so a head without its masks counts as not captured."""

    def __init__(self, device: torch.device, limits: Limits, buckets: Buckets) -> None:
        self._limits = limits
        self._buckets = buckets

        self._works: dict[Any, Callable[[bool], None]] = {}
        self._used: Counter[Any] = Counter()
        self.runner: ModelRunner | None = None

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, HeadShape) and self.runner is not None:
            rows = self.runner.state.rows
            low, high = self.runner.state.gate.tolist()
            step = (low & 0xFFFFFFFF) + (high << 32)
            hook = next(hook for hook in self.runner.sized.hooks if isinstance(hook, Mask))
            lanes = rows.lanes[(rows.lanes >= 0) & ((rows.flags & RowFlag.GATED) != 0)].long()
            if hook.inputs is not None and (hook.inputs.input_flags.flags[lanes] < step).any():
                return False
        return key in self._works

    def capture(self, works: Mapping[Any, Callable[[bool], None]], progress: Any = None) -> None:
        self._works.update(works)
        for work in works.values():
            work(False)

    def replay(self, key: Any) -> None:
        self._used[key] += 1
        self._works[key](False)

    def seconds(self, key: Any) -> float:
        return 1.0

    def used(self) -> set[Any]:
        """Returns the keys of replayed graphs."""
        return set(self._used)


def with_graphs(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> Replays:
    monkeypatch.setattr("quire.runner.model_runner.Graphs", Replays)
    runner = engine.runner
    graphs, _ = runner._captured(runner.sized)
    runner.running.graphs = graphs
    assert isinstance(graphs, Replays)
    graphs.runner = runner
    return graphs


def jobs(seed: int) -> list[Job]:
    prompts = random_prompts(7, 24, seed)
    return [
        Job(prompt, PARAMS[(i // 2 + i) % len(PARAMS)], seed=i) for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), TINY)


def tokens_are_allowed(engine: GatedEngine, outputs: Sequence[Request]) -> None:
    for request in outputs:
        if int(request.request_id.partition("-")[0]) % 2 == 0:
            for place, token in enumerate(request.output.tolist(), request.prompt_len):
                mask = mask_of(request.request_id, place)
                assert mask[token >> 5] >> (token & 31) & 1


def run(engine: GatedEngine, work: Sequence[Job]) -> tuple[list[list[int]], list[Any]]:
    """Returns the tokens and the requested log-probabilities."""
    requests = [r for i, job in enumerate(work) for r in engine.add(str(i), job)]
    engine.drain()
    tokens_are_allowed(engine, requests)
    assert engine.scheduler.stats().blocks_used == [0]
    found: dict[str, list[Any]] = {}
    for progress in engine.progress:
        for item in progress:
            if item.logprobs is not None:
                part = item.logprobs
                values = np.round(part.values, 3).tolist()
                found.setdefault(item.request.request_id, []).append(
                    (part.ids.tolist(), part.positions.tolist(), values)
                )
    return [request.output.tolist() for request in requests], sorted(found.items())


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        *(pytest.param(options, False, id=f"{name}-op by op") for name, options in OPTIONS.items()),
        pytest.param(OPTIONS["late"], True, id="late-graphs"),
        *(
            pytest.param(OPTIONS[name], True, id=f"{name}-graphs", marks=pytest.mark.slow)
            for name in ("one", "two", "preempted")
        ),
    ],
)
def test_tokens_are_the_same_in_every_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], graphs: bool
) -> None:
    expected = run(GatedEngine(folder), jobs(3))
    engine = GatedEngine(folder, **options)
    replays = with_graphs(engine, monkeypatch) if graphs else None
    assert run(engine, jobs(3)) == expected
    if replays is not None:
        used = replays.used()
        assert {key.level for key in used if isinstance(key, HeadShape)} >= {Level.FULL}
        assert {key.longest for key in used if isinstance(key, BodyShape)} > {1}
        assert "prompt_logprobs" in used
    assert any(plan.gated for plan in engine.plans)
    assert bool(engine.overtaken) == bool(options.get("late"))
    if "blocks" in options:
        assert engine.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("graphs", WAYS)
def test_lanes_reassigned_before_the_mask_arrives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    work = jobs(5)
    expected = run(GatedEngine(folder), work)[0]
    engine = GatedEngine(folder, depth=3, late=0.8, lanes=3)
    if graphs:
        with_graphs(engine, monkeypatch)
    gone = [engine.add(str(100 + 2 * i), job) for i, job in enumerate(work[:4])]
    kept = [r for i, job in enumerate(work) for r in engine.add(str(i), job)]
    for requests in gone:
        for _ in range(2):
            engine.step()
        for request in requests:
            engine.scheduler.abort(request.request_id)
    engine.drain()
    tokens_are_allowed(engine, kept)
    assert [request.output.tolist() for request in kept] == expected
