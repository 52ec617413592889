"""Outputs depend on the request alone: the real decoder, in fp32, token for token."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.errors import QuireError
from quire.executor import WorkerCall
from quire.layers.attention import KVLayout
from quire.ops import KVFormat
from quire.plan import KVGroup, RowFlag, StepPlan
from quire.runner.hooks import HeadContext, HostHook, Level, ProgramHook
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, HeadShape, StepProgram, StepShape
from quire.runner.readback import PinnedRing, Step
from quire.runner.state import ColumnSpec, Limits
from quire.sampling_params import SamplingParams
from tests.slow import WHOLE
from tests.tiny_engine import (
    TINY,
    TINY_WINDOW,
    VOCAB,
    Job,
    TinyEngine,
    model_folder,
    random_prompts,
)

STEPS: WorkerCall[None, int] = WorkerCall("test.steps")
GREEDY = SamplingParams(temperature=0.0, max_tokens=18)
WILD = SamplingParams(
    temperature=1.2,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={9: 2.0},
    min_tokens=4,
    max_tokens=18,
    n=2,
)


@pytest.fixture(scope="module", params=["full", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY if request.param == "full" else TINY_WINDOW
    return model_folder(tmp_path_factory.mktemp(request.param), config)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    shared = random_prompts(1, 61, seed=9)[0]
    prompts = random_prompts(6) + [shared + tail for tail in random_prompts(4, 9, seed=4)]
    return [Job(prompt, GREEDY if i % 2 else WILD, seed=10 + i) for i, prompt in enumerate(prompts)]


def alone(folder: Path, jobs: list[Job]) -> list[list[int]]:
    engine = TinyEngine(folder, prefix_caching=False)
    return [tokens for job in jobs for tokens in engine.run([job])]


@pytest.fixture(scope="module")
def each_alone(folder: Path, jobs: list[Job]) -> list[list[int]]:
    return alone(folder, jobs)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_caching": False},
        {"prefix_caching": True},
        {"budget": 16},
        {"depth": 2},
        {"depth": 3, "budget": 24},
        {"blocks": 24, "depth": 2},
        {"lanes": 3, "blocks": 30},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_company(
    folder: Path, jobs: list[Job], each_alone: list[list[int]], settings: dict[str, int]
) -> None:
    engine = TinyEngine(folder, **settings)  # type: ignore[arg-type]
    assert engine.run(jobs) == each_alone
    if settings.get("blocks") == 24:
        assert engine.scheduler.stats().preemptions > 0


def test_prefix_hits_give_the_same_tokens(folder: Path) -> None:
    job = Job(random_prompts(1, 61, seed=1)[0] * 2, GREEDY)
    engine = TinyEngine(folder)
    first = engine.run([job])
    second = engine.run([job])
    assert engine.scheduler.stats().prefix_hit_tokens > 0
    assert first == second == alone(folder, [job])


def test_prefixes_that_end_anywhere_are_found_whole_and_give_the_same_tokens(
    folder: Path,
) -> None:
    """Blocks have 8 tokens, and windows 20."""
    stem = random_prompts(1, 61, seed=5)[0] * 2
    engine, params = TinyEngine(folder), SamplingParams(temperature=0.0, max_tokens=5)
    jobs, expected = [], []
    for shared in range(30, 47 if WHOLE in os.environ else 39):
        before = engine.scheduler.stats().prefix_hit_tokens
        jobs.append(
            Job([*stem[:shared], 6 + shared, *random_prompts(1, 9, seed=shared)[0]], params)
        )
        engine.run([Job([*stem[:shared], 100, 101], params)])
        middle = engine.scheduler.stats().prefix_hit_tokens
        found = engine.run([jobs[-1]])
        assert engine.scheduler.stats().prefix_hit_tokens - middle == shared
        assert middle - before in (0, shared - 1)
        expected += alone(folder, [jobs[-1]])
        assert found == expected[-1:]
    again = TinyEngine(folder, blocks=24, depth=2)
    assert again.run(jobs) == expected


def test_the_next_turn_of_a_chat_computes_only_new_tokens(folder: Path) -> None:
    engine, known, fed = TinyEngine(folder), random_prompts(1, 61, seed=6)[0], 0
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    for turn in range(5):
        (request,) = engine.add(str(turn), Job(known, params))
        engine.drain()
        assert request.num_cached_tokens == fed
        assert [request.output.tolist()] == alone(folder, [Job(known, params)])
        known = [*request.tokens.view().tolist(), 50 + turn, 51]
        fed = len(known) - 3  # an answer's last token was not


@pytest.mark.parametrize(
    "kv_format",
    [
        KVFormat(torch.float32),
        KVFormat(torch.float8_e4m3fn, "head"),
        KVFormat(torch.float8_e4m3fn, "token"),
        KVFormat(torch.uint8, "token"),
    ],
    ids=str,
)
def test_blocks_are_copied_in_order(monkeypatch: pytest.MonkeyPatch, kv_format: KVFormat) -> None:
    """This holds for any number of staging slots: a block may be overwritten once it was read.
    Scales are copied, too."""
    group = KVGroup(layers=(0, 1), tokens_per_block=2)
    for most in (1, 3 * 2 * 2 * 2 * 2 * 4 * 4, 1 << 20):
        monkeypatch.setattr("quire.runner.kv_cache._COPY_BYTES", most)
        cache = KVCache(
            [group],
            [8],
            layouts=[KVLayout(2, 4, 2)],
            kv_format=kv_format,
            device=torch.device("cpu"),
        )
        tensors = cache.block_tensors(0)
        assert len(tensors) == 1 + (kv_format.scales == "token")
        for tensor in tensors:
            numbers = torch.arange(8.0).to(tensor.dtype)
            tensor.copy_(numbers.view(8, *[1] * (tensor.dim() - 1)).expand_as(tensor))
        cache.copy_blocks(0, torch.tensor([1, 2, 3, 5]), torch.tensor([6, 2, 1, 3]))
        for tensor in tensors:
            blocks = tensor.float().flatten(1)
            assert blocks[:, 0].tolist() == [0, 3, 2, 5, 4, 5, 1, 7]
            assert (blocks == blocks[:, :1]).all()


def test_a_fork_in_mid_block_leaves_the_parent_alone(tmp_path: Path) -> None:
    """The child's first write goes to a copy: the block it came from keeps its bytes."""
    folder = model_folder(tmp_path / "model", TINY)
    prompt = random_prompts(1, 61, seed=2)[0][:21]  # 21 tokens: position 20 lies inside a block
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True)
    engine = TinyEngine(folder, prefix_caching=False)
    requests = engine.add("a", Job(prompt, params, seed=4))

    copied: list[tuple[Tensor, Tensor]] = []
    submit = engine.executor.submit

    def watch(plan: StepPlan) -> None:
        sources = [copies.src for copies in plan.copies if len(copies.src)]
        before = [engine.runner.cache.block_tensors(0)[0][src].clone() for src in sources]
        submit(plan)
        for src, was in zip(sources, before, strict=True):
            # Positions up to the last prompt token; the parent may write after them.
            filled = (len(prompt) - 1) % 8
            now = engine.runner.cache.block_tensors(0)[0][src]
            copied.append((was[..., :filled, :], now[..., :filled, :]))

    engine.executor.submit = watch  # type: ignore[method-assign]
    engine.drain()
    assert copied
    assert all(torch.equal(was, now) for was, now in copied)
    outputs = [request.output.tolist() for request in requests]
    assert len({tuple(tokens) for tokens in outputs}) == 3
    for index, tokens in enumerate(outputs):
        lone = TinyEngine(folder, prefix_caching=False)
        single = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        request = lone.add("b", Job(prompt, single, seed=4))[0]
        request.sample_index = index
        lone.drain()
        assert request.output.tolist() == tokens


def test_prompt_logprobs_do_not_depend_on_chunks(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    prompt = random_prompts(1, 61, seed=3)[0] * 2
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, logprobs=2)
    found = []
    for budget in (256, 16):
        engine = TinyEngine(folder, budget=budget)
        engine.run([Job(prompt, params)])
        parts = [p.prompt_logprobs for p in engine.progress if p.prompt_logprobs is not None]
        positions = np.concatenate([part.positions for part in parts])
        ids = np.concatenate([part.ids for part in parts])
        values = np.concatenate([part.values for part in parts])
        assert positions.tolist() == list(range(1, len(prompt)))
        assert ids[:, 0].tolist() == prompt[1:]
        found.append((ids, values))
        sampled = [p.logprobs for p in engine.progress if p.logprobs is not None]
        assert [part.positions.tolist() for part in sampled] == [[len(prompt)], [len(prompt) + 1]]
        assert all(part.ids.shape == (1, 3) and part.ranks[0] == 1 for part in sampled)
    assert (found[0][0] == found[1][0]).all()
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)


def test_steps_without_news_upload_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: its prompt, its first decode, and every eighth token's block are news."""
    folder = model_folder(tmp_path / "model", TINY)
    sizes = list[int]()
    copy = PinnedRing.copy

    def count(ring: PinnedRing, parts: Sequence[Int32]) -> Tensor:
        copied = copy(ring, parts)
        sizes.append(len(copied))
        return copied

    monkeypatch.setattr(PinnedRing, "copy", count)
    engine = TinyEngine(folder)
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    engine.run([Job([6, 7, 8], params)])
    assert len(engine.progress) == 33
    assert len(sizes) == 2 + 4
    inputs = len(engine.runner.state.inputs)
    assert sum(size >= inputs for size in sizes) == 2


class Programs:
    """Programs that run op by op under the names of captured ones."""

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self.seen = list[Any]()

    def body(self, step: BodyShape, skew: float = 1.0) -> BodyShape:
        return step

    def head(self, logit_rows: int, level: Level) -> HeadShape:
        return HeadShape(logit_rows, level)

    def step(self, body: BodyShape, head: HeadShape) -> StepShape | None:
        return StepShape(body, head) if body.longest == 1 and head.level == Level.PLAIN else None

    def replay(self, key: Any) -> None:
        self.seen.append(key)
        if not isinstance(key, HeadShape):
            self._program.body(key.body if isinstance(key, StepShape) else key)
        if not isinstance(key, BodyShape):
            self._program.head(key.head if isinstance(key, StepShape) else key)


def test_body_and_head_of_a_decode_are_one_program(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    jobs = [Job([6, 7, 8], GREEDY), Job([9, 10], GREEDY)]
    alone = TinyEngine(folder).run(jobs)
    engine = TinyEngine(folder)
    running = engine.runner.running
    running.graphs = programs = Programs(running.program)
    assert engine.run(jobs) == alone
    kinds = [type(key) for key in programs.seen]
    assert kinds[:2] == [BodyShape, HeadShape]
    assert set(kinds[2:]) == {StepShape}


class TwoBodies(Programs):
    """Programs of which decodes have two, by the skew of their rows."""

    def body(self, step: BodyShape, skew: float = 1.0) -> BodyShape:
        return replace(step, even=skew <= 1.5) if step.longest == 1 else step


def test_the_lengths_of_decodes_choose_their_body(tmp_path: Path) -> None:
    """Eight short rows beside a long one, which ends first."""
    folder = model_folder(tmp_path / "model", TINY)
    short, long = (
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (16, 8)
    )
    jobs = [Job([6] * 90, long), *[Job([7, 8, 9], short)] * 8]
    alone = TinyEngine(folder, lanes=9).run(jobs)
    engine = TinyEngine(folder, lanes=9)
    running = engine.runner.running
    running.graphs = programs = TwoBodies(running.program)
    assert engine.run(jobs) == alone
    bodies = [key.body for key in programs.seen if isinstance(key, StepShape)]
    assert {body.even for body in bodies if body.rows == 9} == {False}
    assert {body.even for body in bodies if body.rows == 8} == {True}


def test_gated_rows_wait_for_their_mask(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    engine = TinyEngine(folder, depth=2)
    engine.add("a", Job([6, 7, 8], GREEDY))
    engine.add("b", Job([9, 10], GREEDY))
    plan = engine.scheduler.plan()
    assert plan is not None
    plan.flags = plan.flags | int32([RowFlag.GATED, 0])
    engine.executor.submit(plan)
    behind = engine.scheduler.plan()
    assert behind is not None
    engine.executor.submit(behind)
    mask = np.zeros((1, VOCAB // 32), dtype=np.int32)
    mask[0, 2] = 1 << 3  # token 67 alone
    engine.submit_masks(plan.step_id, {int(plan.lanes[0]): mask})
    result = engine.executor.collect()
    assert result.tokens[0, 0] == 67
    assert result.n_tokens.tolist() == [1, 1]
    expected = TinyEngine(folder).run([Job([9, 10], GREEDY)])[0][:2]
    # The step behind has waited too.
    assert [result.tokens[1, 0], engine.executor.collect().tokens[1, 0]] == expected


def test_hooks_see_every_step_and_own_columns(tmp_path: Path) -> None:
    class Forbid(ProgramHook, HostHook):
        """Masks all tokens except 67."""

        def __init__(self) -> None:
            self.steps = 0
            self.seen: list[int] = []

        def columns(self, limits: Limits) -> list[ColumnSpec]:
            return [ColumnSpec("forbid")]

        def hidden(self, step: Step, hidden: Tensor) -> None:
            self.steps += 1

        def logits(self, ctx: HeadContext) -> None:
            if ctx.tokens is None:
                ctx.logits = torch.zeros_like(ctx.raw).index_fill_(1, torch.tensor([67]), 9.0)

        def read(self, step: Step) -> None:
            self.seen += step.result.tokens[:, 0].tolist()

        def calls(self) -> dict[WorkerCall[Any, Any], Callable[[Any], Any]]:
            return {STEPS: lambda _: self.steps}

    hook = Forbid()
    engine = TinyEngine(model_folder(tmp_path / "model", TINY), hooks=[hook])
    assert engine.run([Job([6, 7], SamplingParams(temperature=0.0, max_tokens=5))]) == [[67] * 5]
    assert hook.seen == [67] * 5
    assert engine.runner.call(STEPS, None) == hook.steps == 5
    assert "forbid" in engine.runner.state.columns
    with pytest.raises(QuireError, match="no hook of this worker takes the call 'test'"):
        engine.runner.call(WorkerCall("test"), None)
