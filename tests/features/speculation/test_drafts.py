"""Drafts change only the speed: with any drafts, a run gives the same tokens, log-probabilities and
ends as without. Models compute in float64, so that rounding cannot change a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.arrays import Int32, int32
from quire.errors import QuireError
from quire.plan import RowFlag, claim_width
from quire.runner import Hook
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder
from tests.slow import slow
from tests.tiny_engine import TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

DRAFTS = 3
WIDTH = claim_width(DRAFTS)


class Verifier(Hook):
    drafts = DRAFTS


class Script(Feature):
    """Drafts from the texts of an earlier run.

    kind: "right" drafts the right tokens; "wrong" wrong ones; "partly" becomes wrong at random;
    "late" repeats the previous plan's drafts; "none" asks for drafts and gives none; "mixed" picks
    one of these for each row. Rows ask for random numbers of drafts.
    """

    def __init__(self, texts: dict[str, list[int]], kind: str, seed: int = 0) -> None:
        self._texts = texts
        self.kind = kind
        self._draw = np.random.default_rng(seed)
        self._before: dict[str, tuple[list[int], int]] = {}

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        return np.minimum(room, int32(self._draw.integers(0, DRAFTS + 1, len(lanes))))

    def plan(self, builder: PlanBuilder) -> None:
        rows = np.flatnonzero((builder.flags & RowFlag.PROMPT) == 0)
        if not len(rows):
            return
        claims = [self._claim(builder.requests[row].request_id) for row in rows.tolist()]
        for row, claim in zip(rows.tolist(), claims, strict=True):
            request = builder.requests[row]
            start = max(0, request.known - 1)
            self._before[request.request_id] = self._text(request.request_id, start), start
            if claim is None:
                claim = self._before[request.request_id]
            builder.write("draft_ids", builder.lanes[[row]], int32([claim[0]]))
            builder.write("draft_start", builder.lanes[[row]], int32([claim[1]]))

    def _text(self, name: str, start: int) -> list[int]:
        text = self._texts[name][start : start + WIDTH]
        return text + [-1] * (WIDTH - len(text))

    def _claim(self, name: str) -> tuple[list[int], int] | None:
        """Returns the drafts of a request, None for each right one."""
        kinds = ["right", "wrong", "partly", "late", "none"]
        kind = self._draw.choice(kinds) if self.kind == "mixed" else self.kind
        if kind == "late":
            return self._before.get(name, ([-1] * WIDTH, 0))
        if kind == "none":
            return [-1] * WIDTH, 0
        if kind == "right" or name not in self._before:
            return None
        text, start = self._before[name]
        if kind == "wrong":
            return [self._draw.integers(6, VOCAB).item() for _ in text], start
        turn = int(self._draw.integers(0, WIDTH))
        return text[:turn] + [6] * (WIDTH - turn), start


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, max_tokens=20, n=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17),
    SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        max_tokens=24,
    ),
    SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=2, max_tokens=15),
    SamplingParams(temperature=0.9, stop_token_ids=tuple(range(20, 45)), min_tokens=5),
    SamplingParams(temperature=0.0, logit_bias={9: 2.0, 40: -1.0}, max_tokens=20),
    SamplingParams(temperature=0.0, ignore_eos=True, repetition_penalty=1.2, max_tokens=40),
]


def jobs() -> list[Job]:
    prompts = random_prompts(len(PARAMS), 61, seed=11)
    prompts[3] = prompts[0] + prompts[3][:5]
    return [
        Job(prompt, params, seed=5 + i)
        for i, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]


def told(engine: TinyEngine) -> dict[str, list[tuple[object, ...]]]:
    """Returns each request's log-probabilities, rounded, in the order of their positions."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for step in engine.progress:
        for item in step:
            if item.logprobs is not None:
                part = item.logprobs
                for i, position in enumerate(part.positions.tolist()):
                    line = part.ids[i].tolist(), part.values[i].round(6).tolist()
                    entry = position, *line, int(part.ranks[i])
                    found.setdefault(item.request.request_id, []).append(entry)
    return found


Answers = tuple[list[list[int]], list[str | None], dict[str, list[tuple[object, ...]]]]


def answers(engine: TinyEngine) -> Answers:
    return with_texts(engine)[0]


def with_texts(engine: TinyEngine) -> tuple[Answers, dict[str, list[int]]]:
    """Returns answers, and all tokens of each request."""
    requests = [r for i, job in enumerate(jobs()) for r in engine.add(str(i), job)]
    engine.drain()
    ends = [None if r.finish_reason is None else str(r.finish_reason) for r in requests]
    texts = {r.request_id: r.tokens.view().tolist() for r in requests}
    return ([r.output.tolist() for r in requests], ends, told(engine)), texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("drafts") / "model", TINY)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Answers, dict[str, list[int]]]:
    """The answers without drafts, and all tokens of each request."""
    return with_texts(TinyEngine(folder, dtype="float64"))


KINDS = ["right", "wrong", "partly", "late", "none", "mixed"]
SETTINGS = [
    {"depth": 1},
    {"depth": 2, "budget": 48},
    {"depth": 3, "blocks": 34},
    {"depth": 2, "lanes": 3, "prefix_caching": False},
]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (own, kind) if kind == "mixed" or (i + j) % 2 else slow(own, kind)
        for i, own in enumerate(SETTINGS)
        for j, kind in enumerate(KINDS)
    ],
    ids=[f"{own}-{kind}" for own in SETTINGS for kind in KINDS],
)
def test_drafts_change_nothing_but_speed(
    folder: Path,
    plain: tuple[Answers, dict[str, list[int]]],
    kind: str,
    settings: dict[str, int],
) -> None:
    expected, texts = plain
    script = Script(texts, kind, seed=len(kind))
    engine = TinyEngine(
        folder,
        hooks=[Verifier()],
        features=[script],
        dtype="float64",
        **settings,  # type: ignore[arg-type]
    )
    assert answers(engine) == expected
    generated = [n for step in engine.progress for n in step.n_tokens.tolist()]
    if kind == "right":
        assert max(generated) == 1 + DRAFTS
    if kind == "none":
        assert max(generated) == 1
    if settings.get("blocks") == 34:
        assert engine.scheduler.stats().preemptions > 0


def test_masks_hold_for_every_draft(
    folder: Path, plain: tuple[Answers, dict[str, list[int]]]
) -> None:
    """With masks that allow one token per position, a row gives these tokens if its drafts are
    right. If the mask of the first draft's position refuses the draft, it gives only the first
    token."""

    class Gate(Script):
        def plan(self, builder: PlanBuilder) -> None:
            super().plan(builder)
            builder.gate(np.flatnonzero(builder.flags & RowFlag.SAMPLE).tolist())

    wanted = [70, 71, 72, 73, 74, 75, 76, 77, 78]
    prompt = [6, 7, 8]
    for barred in (None, 2):
        script = Gate({"a-0": prompt + wanted}, "right", seed=1)
        engine = TinyEngine(folder, hooks=[Verifier()], features=[script])
        params = SamplingParams(temperature=0.0, max_tokens=len(wanted), ignore_eos=True)
        (request,) = engine.add("a", Job(prompt, params))
        while engine.scheduler.has_work():
            plan = engine.scheduler.plan()
            assert plan is not None
            engine.executor.submit(plan)
            lines = 1 if plan.flags[0] & RowFlag.PROMPT else int(plan.q_len[0])
            mask = np.zeros((lines, VOCAB // 32), dtype=np.int32)
            for line in range(lines):
                place = len(request.output) + line
                token = wanted[min(place, len(wanted) - 1)]
                if place == barred:
                    token = 99
                mask[line, token // 32] = np.uint32(1 << (token % 32)).view(np.int32)
            engine.submit_masks(plan.step_id, {request.lane: mask})
            engine.scheduler.update(engine.executor.collect())
        expected = [99 if i == barred else token for i, token in enumerate(wanted)]
        assert request.output.tolist() == expected


def test_a_feature_with_drafts_needs_a_body_that_verifies(folder: Path) -> None:
    from quire.errors import ConfigError

    with pytest.raises(ConfigError, match="verif"):
        TinyEngine(folder, features=[Script({}, "right")])


def test_the_runner_refuses_more_drafts_than_it_verifies(folder: Path) -> None:
    engine = TinyEngine(folder)
    engine.add("a", Job([6, 7, 8], SamplingParams(temperature=0.0, max_tokens=4)))
    engine.step()
    plan = engine.scheduler.plan()
    assert plan is not None
    plan.q_len = plan.n_logits = plan.q_len + 1
    with pytest.raises(QuireError, match="1 draft tokens"):
        engine.executor.submit(plan)


def test_dummy_tokens_run_the_body(folder: Path) -> None:
    """A rank without rows still enters the model's collectives."""
    engine = TinyEngine(folder)
    engine.add("a", Job([6, 7, 8], SamplingParams(temperature=0.0, max_tokens=3)))
    expected = TinyEngine(folder).run(
        [Job([6, 7, 8], SamplingParams(temperature=0.0, max_tokens=3))]
    )
    seen: list[int] = []
    model = engine.runner.model
    forward = model.forward
    model.forward = lambda batch, *args, **kw: (  # type: ignore[method-assign, assignment]
        seen.append(len(batch.input_ids)),
        forward(batch, *args, **kw),
    )[1]
    request = next(iter(engine.scheduler.requests()))
    while engine.scheduler.has_work():
        plan = engine.scheduler.plan()
        assert plan is not None
        plan.dummy_tokens = 2
        engine.executor.submit(plan)
        engine.scheduler.update(engine.executor.collect())
    assert [request.output.tolist()] == expected
    assert seen == [5, 3, 3]
    nothing = int32([])
    engine.executor.submit(type(plan)(99, nothing, nothing, nothing, nothing, dummy_tokens=4))
    assert engine.executor.collect().step_id == 99
    assert seen[-1] == 4
