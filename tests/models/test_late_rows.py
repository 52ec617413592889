"""Rows whose masks come late at random sit out steps: tokens, log-probabilities and ends are those
of rows that never wait. In float64, so that no rounding turns a choice."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.arrays import Int32
from quire.plan import RowFlag, StepPlan, StopReason
from quire.request import Request
from quire.runner.hooks.mask import Mask
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder
from quire.scheduler.lanes import Flags
from tests.engine.test_hybrid_engine import HYBRID
from tests.features.speculation.test_drafts import Script, Verifier
from tests.features.speculation.test_stage_drafts import SHAPES
from tests.local_stages import LocalStages
from tests.models.test_gated_heads import mask_of
from tests.slow import slow
from tests.tiny_engine import TINY, Job, TinyEngine, model_folder, random_prompts

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, max_tokens=16, n=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, max_tokens=15),
    SamplingParams(temperature=0.9, stop_token_ids=tuple(range(20, 45)), min_tokens=5, n=2),
    SamplingParams(temperature=0.0, logit_bias={9: 2.0, 40: -1.0}, max_tokens=12),
    SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1),
]


def jobs() -> list[Job]:
    prompts = random_prompts(len(PARAMS), 61, seed=11)
    prompts[3] = prompts[0] + prompts[3][:5]
    return [
        Job(prompt, params, seed=5 + i)
        for i, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]


@dataclass(slots=True)
class _GatedRow:
    """A row that waits for masks. Its request must know `known` tokens, if it is a prompt's row;
    else it has `q_len` positions."""

    request: Request
    lane: int
    lane_epoch: int
    known: int
    q_len: int
    built: bool = False

    @property
    def alive(self) -> bool:
        return self.request.lane == self.lane and self.request.lane_epoch == self.lane_epoch

    @property
    def ready(self) -> bool:
        """Whether all tokens before the row are known."""
        if not self.alive:
            return True
        if self.q_len:
            return self.request.planned - self.request.computed <= self.q_len
        return self.request.known >= self.known

    @property
    def lines(self) -> int:
        return max(self.q_len, 1)


class Gate(Feature):
    """Gates two of three requests. Masks are there when the engine says so, row by row."""

    def __init__(self, submit: Any) -> None:
        self._submit = submit
        self.waiting: list[tuple[int, _GatedRow]] = []
        self.current: dict[int, _GatedRow] = {}
        self.late_rows = 0

    def plan(self, builder: PlanBuilder) -> None:
        rows = [
            row
            for row, request in enumerate(builder.requests)
            if int(request.request_id.partition("-")[0]) % 3 and builder.flags[row] & RowFlag.SAMPLE
        ]
        if rows:
            builder.gate(rows)
        for row in rows:
            lane, request = int(builder.lanes[row]), builder.requests[row]
            if builder.flags[row] & RowFlag.HELD:
                assert self.current[lane].built
                self._submit(
                    builder.step_id, {lane: mask_of(request.request_id, request.known)[None]}
                )
                continue
            prompt = builder.flags[row] & RowFlag.PROMPT
            q_len = 0 if prompt else int(builder.q_len[row])
            gated = _GatedRow(request, lane, request.lane_epoch, request.planned, q_len)
            self.waiting.append((builder.step_id, gated))

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        self.late_rows += len(lanes)

    def inputs_ready(self, lanes: Int32) -> Flags:
        return np.array([self.current[lane].built for lane in lanes.tolist()])

    def bring(self, step_id: int, row: _GatedRow) -> None:
        """Submits a row's masks."""
        request = row.request
        row.built = True
        if row.alive:
            masks = [mask_of(request.request_id, request.known + i) for i in range(row.lines)]
            self.current[row.lane] = row
            self._submit(step_id, {row.lane: np.stack(masks)})


class LateEngine(TinyEngine):
    """Brings masks at random, and runs heads before all of them are there."""

    def __init__(
        self, folder: Path, late: float, *, features: tuple[Feature, ...] = (), **options: Any
    ) -> None:
        self.gate = Gate(self.submit_masks)
        self.random = random.Random(7)
        self._late = late
        self.stages = options.get("stages", 1)
        super().__init__(folder, features=(*features, self.gate), dtype="float64", **options)

    def missing(self, hook: Mask, plan: StepPlan, *, wait: bool) -> bool:
        """Stands for `Mask.inputs_missing`: a deadline at random."""
        if self.stages > 1:
            return False  # Other stages in this process would wait for ever.
        waits = plan.gated and not self.late_is_over(plan)
        return bool(waits and not wait and (not self._late or self.random.random() < 0.5))

    def late_is_over(self, plan: StepPlan) -> bool:
        return not any(step == plan.step_id for step, _ in self.gate.waiting)

    def bring(self) -> None:
        for step_id, row in list(self.gate.waiting):
            if not row.ready:
                continue
            self.gate.current[row.lane] = row
            if self.random.random() >= self._late:
                self.gate.waiting.remove((step_id, row))
                self.gate.bring(step_id, row)

    def step(self) -> None:
        while self.scheduler.num_in_flight < self.depth:
            self.bring()
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.plans.append(plan)
            self.executor.submit(plan)
        self.bring()
        if self.scheduler.num_in_flight:
            self.progress.append(self.scheduler.update(self.executor.collect()))

    def answers(self, work: list[Job]) -> Any:
        """Returns tokens, ends and log-probabilities."""
        requests = [r for i, job in enumerate(work) for r in self.add(str(i), job)]
        self.drain()
        return self.of(requests)

    def of(self, requests: list[Request]) -> Any:
        stats = self.scheduler.stats()
        assert stats.blocks_used == [0] * len(stats.blocks_used)
        found: dict[str, list[Any]] = {}
        for step in self.progress:
            assert (step.stop_reason != StopReason.LATE).all()
            for item in step:
                for kind, part in (("new", item.logprobs), ("prompt", item.prompt_logprobs)):
                    if part is not None:
                        lines = zip(part.positions.tolist(), part.ids.tolist(), strict=True)
                        values = part.values.round(6).tolist()
                        found.setdefault(f"{item.request.request_id} {kind}", []).extend(
                            zip(lines, values, strict=True)
                        )
        ends = [str(request.finish_reason) for request in requests]
        return [request.output.tolist() for request in requests], ends, found


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives engines a deadline for heads."""

    def give(engine: LateEngine) -> LateEngine:
        monkeypatch.setattr(
            Mask, "inputs_missing", lambda hook, plan, wait: engine.missing(hook, plan, wait=wait)
        )
        return engine

    return give


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: model_folder(tmp_path_factory.mktemp(name) / "model", config)
        for name, config in (("tiny", TINY), ("hybrid", HYBRID))
    }


_expected: dict[str, Any] = {}


def expected(
    folders: dict[str, Path], name: str, deadlines: Any
) -> tuple[Any, dict[str, list[int]]]:
    """The answers where no row is late, and each request's tokens."""
    if name not in _expected:
        engine = deadlines(LateEngine(folders[name], 0.0))
        requests = [r for i, job in enumerate(jobs()) for r in engine.add(str(i), job)]
        engine.drain()
        assert engine.gate.late_rows == 0
        texts = {r.request_id: r.tokens.view().tolist() for r in requests}
        _expected[name] = engine.of(requests), texts
    found: tuple[Any, dict[str, list[int]]] = _expected[name]
    return found


WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"depth": 2},
    "three": {"depth": 3, "budget": 24},
    "preempted": {"depth": 3, "blocks": 13},
    "deterministic": {"depth": 2, "deterministic": True},
    "stages": {"depth": 3, "stages": 2, "make_executor": LocalStages, "budget": 64},
}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("tiny", "one"), slow("tiny", "two"), ("tiny", "three"), ("tiny", "preempted"),
        ("tiny", "deterministic"), ("tiny", "stages"), slow("hybrid", "one"), ("hybrid", "two"),
        ("hybrid", "preempted"), slow("hybrid", "stages"),
    ],
)  # fmt: skip
def test_late_rows_give_the_same(
    folders: dict[str, Path], deadlines: Any, model: str, way: str, drafts: bool
) -> None:
    answers, texts = expected(folders, model, deadlines)
    more: dict[str, Any] = {}
    if drafts and "stages" in WAYS[way]:
        more = {"speculative": {"method": "suffix", "num_speculative_tokens": 3, "lookup_min": 1}}
    elif drafts:
        more = {"hooks": [Verifier()], "features": (Script(texts, "mixed", seed=3),)}
    engine = deadlines(LateEngine(folders[model], 0.6, **WAYS[way], **more))
    assert engine.answers(jobs()) == answers
    assert engine.gate.late_rows == engine.scheduler.stats().late_rows > 10
    held = [plan for plan in engine.plans if (plan.flags & RowFlag.HELD).any()]
    assert held
    if way == "preempted":
        assert engine.scheduler.stats().preemptions > 0
    if drafts and "stages" not in WAYS[way]:
        assert max(n for step in engine.progress for n in step.n_tokens.tolist()) > 1


@pytest.mark.parametrize(
    ("source", "way"),
    [("draft", "two"), slow("draft", "preempted"), ("draft", "stages"), ("eagle3", "three"),
     slow("eagle3", "stages")],
)  # fmt: skip
def test_late_rows_with_drafts_of_the_device(
    folders: dict[str, Path], deadlines: Any, source: str, way: str
) -> None:
    """The draft model keeps up with the texts of lanes that are held."""
    answers, _ = expected(folders, "tiny", deadlines)
    shape = model_folder(folders["tiny"].parent / f"for-{source}", SHAPES[source])
    speculative = {"method": source, "model": str(shape), "num_speculative_tokens": 3}
    engine = deadlines(LateEngine(folders["tiny"], 0.6, speculative=speculative, **WAYS[way]))
    assert engine.answers(jobs()) == answers
    assert engine.gate.late_rows > 10
    verified = [plan.q_len[(plan.flags & RowFlag.PROMPT) == 0] for plan in engine.plans]
    assert sum(int((q_len > 1).sum()) for q_len in verified) > 20


def test_plain_rows_never_wait(folders: dict[str, Path], deadlines: Any) -> None:
    """A request without masks gets a token in every step beside one whose masks never come."""
    engine = deadlines(LateEngine(folders["tiny"], 1.0))
    engine.missing = lambda hook, plan, wait: False
    (plain,) = engine.add("0", jobs()[0])
    (gated,) = engine.add("1", replace(jobs()[0]))
    while not plain.finished:
        before = plain.known
        engine.step()
        assert plain.finished or plain.known == before + 1
    assert gated.output.tolist() == []
    # A lane that is held has one more position than the scheduler counts.
    assert (gated.computed, gated.planned) == (gated.known - 1, gated.known - 1)
    engine.scheduler.abort("1-0")
    engine.drain()
    assert engine.scheduler.stats().blocks_used == [0]
    assert engine.gate.late_rows == 1


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_lanes_of_late_rows_that_are_taken_again(
    folders: dict[str, Path], deadlines: Any, seed: int
) -> None:
    """Aborts while rows are late: lanes, blocks and lines go to others."""
    answers, _ = expected(folders, "tiny", deadlines)
    engine = deadlines(LateEngine(folders["tiny"], 0.7, depth=3, lanes=3))
    draw = random.Random(seed)
    kept: list[Request] = []
    for i, job in enumerate(jobs()):
        kept += engine.add(str(i), job)
        # Of the same job, so that the same masks hold, but another name.
        gone = engine.add(str(100 + i), job)
        for _ in range(draw.randrange(4)):
            engine.step()
        for request in gone:
            engine.scheduler.abort(request.request_id)
    engine.drain()
    assert [request.output.tolist() for request in kept] == answers[0]
    assert engine.gate.late_rows > 0
