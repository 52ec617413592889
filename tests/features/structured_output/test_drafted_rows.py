"""Rows with a grammar that verify drafts: masks, one per draft, are built once all earlier tokens
are known."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.arrays import Int32, int32
from quire.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.features.structured_output.feature import GrammarFeature
from quire.features.structured_output.mask_builders import MaskThread
from quire.features.structured_output.masks import MaskBuilder, MaskRow
from quire.input_memory import DEPTH, InputMemory, InputShape
from quire.plan import DRAFT_IDS, DRAFT_START, KVGroup, RowFlag, StepPlan
from quire.request import Request
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.scheduler import Feature, PlanBuilder
from tests.fakes import FakeExecutor, expected_output

_WIDTH = 40


class AnyText:
    """A matcher that accepts every token."""

    def deep_copy(self) -> AnyText:
        return self

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True


class StubCompiler:
    vocab_size, tokenizer_vocab, eos_token_ids = 32, 32, (0,)
    config, memory = SimpleNamespace(timeout=10.0), None
    compiles, compile_seconds = 0, 0.0

    def warm_up(self) -> None:
        pass

    def compile(self, params: StructuredOutputsParams) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(AnyText())
        return done

    def walk(self, params: StructuredOutputsParams, *, repeated: bool) -> None:
        return None

    def shutdown(self) -> None:
        pass


Built = list[tuple[int, int, list[int]]]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """Records the rows of built masks, in order: position, lines, drafts."""
    found: Built = []

    def build(builder: MaskBuilder, rows: Sequence[MaskRow], masks: Int32, vocab: int) -> None:
        for row in rows:
            assert len(masks) == row.lines
            assert row.state is not None
            found.append((row.state.position, row.lines, list(row.drafts)))

    monkeypatch.setattr(MaskBuilder, "build", build)
    return found


class Claims(Feature):
    """Drafts the text of each request, which is wrong from its ninth token on."""

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        return int32([3] * len(lanes))

    def plan(self, builder: PlanBuilder) -> None:
        for row, request in enumerate(builder.requests):
            if builder.flags[row] & RowFlag.PROMPT:
                ids = text_of(request)[:8] + [1] * (_WIDTH - 8)
                lane = builder.lanes[row : row + 1]
                builder.write(DRAFT_IDS, lane, int32([ids]))
                builder.write(DRAFT_START, lane, int32([request.prompt_len]))


class Gated(FakeExecutor):
    """Waits for the masks of a step, as a device does."""

    def __init__(self) -> None:
        group = KVGroup(layers=(0,), tokens_per_block=4)
        super().__init__([group], [80], logit_rows=40)
        self.plans: list[StepPlan] = []
        shape = InputShape(4, 4, 1, 6, _WIDTH)
        self.inputs = InputMemory(shape, np.zeros(shape.size, dtype=np.int8))
        self._ids, self._start = int32([[-1] * _WIDTH] * 4), int32([0] * 4)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for column, values in ((DRAFT_IDS, self._ids), (DRAFT_START, self._start)):
            if column in plan.writes:
                lanes, written = plan.writes[column]
                values[lanes] = written
        place = plan.step_id % DEPTH
        self.inputs.claim_ids[place], self.inputs.claim_starts[place] = self._ids, self._start
        self._say(1, plan)
        super().submit(plan)

    def _say(self, kind: int, plan: StepPlan) -> None:
        self.inputs.newest[kind] = plan.step_id + 1
        self.inputs.on_arrival()

    def collect(self) -> Any:
        plan = self._queue[0]
        gated = plan.lanes[(plan.flags & RowFlag.GATED) != 0]
        assert self.inputs.has(plan.step_id, gated, wait=True)
        result = super().collect()
        into = self.inputs.results[plan.step_id % DEPTH, : plan.num_rows]
        into[:, 0], into[:, 1] = result.n_tokens, result.stop_reason
        into[:, 2 : 2 + result.tokens.shape[1]] = result.tokens
        self._say(0, plan)
        return result


def text_of(request: Request) -> list[int]:
    return expected_output(request, 50, None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_draft_of_a_gated_row_has_a_mask(built: Built, depth: int) -> None:
    executor, compiler = Gated(), StubCompiler()
    thread = MaskThread(compiler, device=False)  # type: ignore[arg-type]
    grammars = GrammarFeature(thread, 4, compiler.vocab_size, compiler.eos_token_ids)
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, steps_in_flight=depth
    )
    config = SimpleNamespace(
        args=SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs"),
        scheduler=scheduler,
        encoder=False,
    )
    core = EngineCore(config, executor, [Claims()], [grammars])  # type: ignore[arg-type]
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*"))
    (gated,) = core.add("gated", int32(range(6)), asked, max_total=26)
    (plain,) = core.add("plain", int32(range(7)), SamplingParams(), max_total=27)
    while core.has_work():
        core.step()
    text = text_of(gated)
    assert gated.output.tolist() == text
    assert plain.output.tolist() == text_of(plain)
    assert core.take_failures() == []
    admits = [admit for plan in executor.plans for admit in plan.admits]
    (lane,) = (admit.lane for admit in admits if admit.request_id == "gated/0")
    n_logits = [
        int(plan.n_logits[np.flatnonzero(plan.lanes == lane)[0]])
        for plan in executor.plans
        if plan.gated
    ]
    claim = [*text[:8], *[1] * (_WIDTH - 8)]
    positions = []
    for (position, asked_lines, drafts), lines in zip(built, n_logits, strict=True):
        done = position - 6
        positions.append(done)
        assert asked_lines == lines
        right = text[:done] == claim[:done]
        assert drafts == (claim[done : done + lines - 1] if right else [])
    # Every mask was built for all tokens before it, and accepted drafts were passed over.
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert len(positions) < len(text)
    core.shutdown()
