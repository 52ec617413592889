"""Requests that run while weights change, and the versions of their tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from quire import LLM
from quire.engine.loop.core import EngineCore
from quire.errors import ModelError, RequestError, WeightsError
from quire.features.weight_updates.calls import (
    ABORT_ALL,
    PAUSE,
    RESUME,
    STATE,
    UPDATE,
    Pause,
    UpdateWeights,
    WeightsState,
)
from quire.features.weight_updates.payloads import FolderSource, LocalSource
from quire.models.updates import WeightUpdate
from quire.request import FinishReason, RequestStatus
from tests.features.weight_updates.changed_models import GREEDY, Models, run, start
from tests.slow import examples, slow

PROMPT = [5, 17, 99, 3, 42, 7, 7, 150, 23, 61, 8, 14, 77, 100, 2, 31, 19, 20]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


Open = Callable[..., EngineCore]


@pytest.fixture
def open_core(models: Models) -> Iterator[Open]:
    opened: list[LLM] = []

    def open(**settings: Any) -> EngineCore:
        settings = {"num_kv_blocks": 200, "max_num_seqs": 8, "block_size": 4, **settings}
        folder = str(models.folders[0])
        opened.append(LLM(folder, skip_tokenizer_init=True, max_model_len=128, **settings))
        opened[-1]._core.call(STATE, None)
        return opened[-1]._core

    yield open
    for llm in opened:
        llm.shutdown()


def update(core: EngineCore, models: Models, index: int, mode: str) -> Future[WeightsState]:
    found: Future[WeightsState] = core.call(
        UPDATE, UpdateWeights(FolderSource(str(models.folders[index])), mode, label=f"w{index}")
    )
    return found


def test_running_requests_end_first(models: Models, open_core: Open) -> None:
    core = open_core(max_num_seqs=1)
    first, second = start(core, "a", PROMPT, GREEDY), start(core, "b", PROMPT, GREEDY)
    run(core, lambda: first.num_output_tokens == 3)
    answer = update(core, models, 1, "wait")
    run(core, answer.done)
    assert first.finished
    assert second.status is not RequestStatus.FINISHED
    run(core, lambda: second.finished)
    assert first.version_runs == [(0, 24)]
    models.check(first, [0, 1])
    assert second.version_runs == [(1, 24)]
    models.check(second, [0, 1])
    assert answer.result().label == "w1"
    assert answer.result().labels == {1: "w1"}


def test_running_requests_keep_their_kv(models: Models, open_core: Open) -> None:
    core = open_core()
    request = start(core, "a", PROMPT, GREEDY)
    run(core, lambda: request.num_output_tokens == 5)
    run(core, update(core, models, 1, "keep").done)
    assert request.status is RequestStatus.RUNNING
    run(core, lambda: request.finished)
    runs = request.version_runs
    assert [version for version, _ in runs] == [0, 1]
    assert sum(count for _, count in runs) == 24
    # Its tokens before are those of the old weights, and the tree has nothing of those behind.
    text = request.tokens.view().tolist()
    at = len(PROMPT) + runs[0][1]
    assert text[len(PROMPT) : at] == models.choices(0, text)[len(PROMPT) - 1 : at - 1]
    again = start(core, "b", text[:-1], replace(GREEDY, max_tokens=8))
    run(core, lambda: again.finished)
    assert again.num_cached_tokens == 0
    models.check(again, [0, 1])


def test_running_requests_start_over(models: Models, open_core: Open) -> None:
    core = open_core()
    request = start(core, "a", PROMPT, GREEDY)
    run(core, lambda: request.num_output_tokens == 5)
    run(core, update(core, models, 2, "retract").done)
    run(core, lambda: request.finished)
    assert [version for version, _ in request.version_runs] == [0, 1]
    models.check(request, [0, 2])
    assert core.stats().preemptions == 0


def test_running_requests_are_aborted(models: Models, open_core: Open) -> None:
    core = open_core(max_num_seqs=1)
    requests = [start(core, name, PROMPT, GREEDY) for name in "ab"]
    run(core, lambda: requests[0].num_output_tokens == 5)
    run(core, update(core, models, 1, "abort").done)
    run(core, lambda: requests[1].finished)
    assert [request.finish_reason for request in requests] == [FinishReason.ABORT] * 2
    assert [error for _, error in core.take_failures()] == [None, None]
    request = start(core, "c", PROMPT, GREEDY)
    run(core, lambda: request.finished)
    models.check(request, [0, 1])


def test_a_pause(models: Models, open_core: Open) -> None:
    core = open_core()
    request = start(core, "a", PROMPT, GREEDY)
    run(core, lambda: request.num_output_tokens == 5)
    pause = core.call(PAUSE, Pause("keep"))
    run(core, pause.done)
    assert pause.result().paused
    for _ in range(5):
        core.step()
    assert request.num_output_tokens == 5
    stuck = update(core, models, 1, "wait")
    run(core, stuck.done)
    with pytest.raises(RequestError, match="cannot end while the engine is paused"):
        stuck.result()
    later = start(core, "b", PROMPT, GREEDY)
    run(core, update(core, models, 1, "retract").done)
    assert later.num_output_tokens == 0
    run(core, core.call(RESUME, None).done)
    run(core, lambda: request.finished and later.finished)
    models.check(request, [0, 1])
    models.check(later, [0, 1])
    last = start(core, "c", PROMPT, GREEDY)
    aborted = core.call(ABORT_ALL, None)
    run(core, lambda: last.finished)
    assert aborted.result() == 1


def test_a_wrong_update_changes_nothing(models: Models, open_core: Open) -> None:
    core = open_core()
    request = start(core, "a", PROMPT, GREEDY)
    answer = core.call(UPDATE, UpdateWeights(FolderSource(str(models.folders[0] / "none")), "keep"))
    run(core, answer.done)
    with pytest.raises(ModelError, match="not a folder"):
        answer.result()
    answer = core.call(UPDATE, UpdateWeights(LocalSource(99), "keep"))
    run(core, answer.done)
    with pytest.raises(ModelError, match="no tensors of number 99"):
        answer.result()
    answer = core.call(UPDATE, UpdateWeights(FolderSource("x"), "keep", id="xyz"))
    run(core, answer.done)
    with pytest.raises(RequestError, match="32 lower-case"):
        answer.result()
    run(core, lambda: request.finished)
    models.check(request, [0])
    assert core.call(STATE, None) == WeightsState()
    assert core.stats().weight_updates.failures == 2


def test_an_update_that_breaks_off(
    models: Models, open_core: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = open_core()
    request = start(core, "a", PROMPT, GREEDY)
    run(core, lambda: request.num_output_tokens == 5)
    with monkeypatch.context() as patch:
        patch.setattr(WeightUpdate, "write", lambda *_: 1 / 0)
        answer = update(core, models, 1, "keep")
        run(core, answer.done)
    with pytest.raises(WeightsError, match="incomplete: ZeroDivisionError"):
        answer.result()
    run(core, lambda: request.finished)
    ((failed, error),) = core.take_failures()
    assert failed is request
    assert isinstance(error, WeightsError)
    assert core.call(STATE, None).incomplete
    with pytest.raises(WeightsError):
        start(core, "b", PROMPT, GREEDY)
    name, tensor = next(iter(models.tensors(1).items()))
    core._loop_features[-1]._hook.local[1] = {name: tensor}
    answer = core.call(UPDATE, UpdateWeights(LocalSource(1)))
    run(core, answer.done)
    with pytest.raises(RequestError, match="must bring all of its tensors"):
        answer.result()
    run(core, update(core, models, 1, "keep").done)
    assert not core.call(STATE, None).incomplete
    request = start(core, "c", PROMPT, GREEDY)
    run(core, lambda: request.finished)
    models.check(request, [0, 1, 1])


@pytest.mark.parametrize("settings", [
    {},
    {"speculative": {"method": "suffix"}},
    slow({"tensor_parallel_size": 2}),
    {"pipeline_parallel_size": 2},
], ids=["plain", "drafts", "tensor", "pipeline"])  # fmt: skip
def test_updates_at_random_moments(
    models: Models, open_core: Open, settings: dict[str, Any]
) -> None:
    """Requests of common prefixes run with too few blocks while weights change. Every token is the
    choice of the weights of its version."""
    draw = random.Random(str(settings))
    core = open_core(num_kv_blocks=40, max_num_seqs=6, max_num_batched_tokens=32, **settings)
    weights, requests, answers = [0], [], []
    for count in range(examples(120)):
        if draw.random() < 0.4:
            prompt = PROMPT[: draw.randint(1, len(PROMPT))] + [draw.randrange(3, 200)] * 3
            params = replace(GREEDY, max_tokens=draw.randint(1, 40))
            requests.append(start(core, str(count), prompt, params))
        if draw.random() < 0.15:
            index = draw.randrange(3)
            answers.append(update(core, models, index, draw.choice(["wait", "retract", "retract"])))
            weights.append(index)
        for _ in range(draw.randint(0, 6)):
            core.step()
    run(core, lambda: all(r.finished for r in requests) and all(a.done() for a in answers))
    assert [answer.result().version for answer in answers] == list(range(1, len(weights)))
    for request in requests:
        models.check(request, weights)
    assert len({weights[version] for r in requests for version, _ in r.version_runs}) > 1
    assert core.stats().prefix_hit_tokens > 0
