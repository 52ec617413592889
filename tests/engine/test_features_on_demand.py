"""Features turned on by the first request that uses them, in a running engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.arrays import Int32, int32
from quire.config import EngineArgs, SchedulerConfig
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.errors import ConfigError, QuireError, RequestError
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature, RequestedFeature
from quire.plan import KVGroup, RowFlag
from quire.request import Request
from quire.runner import Hook
from quire.runner.state import ColumnSpec, Limits
from quire.sampling_params import StructuredOutputsParams
from quire.scheduler import Feature, PlanBuilder
from tests.fakes import FakeExecutor
from tests.tiny_engine import TINY, Job, TinyEngine, model_folder

SETTINGS = {"device": "cpu", "kv_cache_gb": 0.1, "max_num_seqs": 8}
CALL = """
import json, sys
from quire import LLM, SamplingParams
llm = LLM(device="cpu", kv_cache_gb=0.1)
llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
print(json.dumps([name for name in sys.modules if name.startswith("quire.")]))
"""


class Counting(Feature, LoopFeature):
    """Counts the plans it sees, and refuses requests for three tokens."""

    def __init__(self) -> None:
        self.plans = 0
        self.attached = False

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    def attach(self, blocks: object, wake: object) -> None:
        self.attached = True

    def admit(self, request: Request) -> RequestError | None:
        return RequestError("no") if request.params.max_tokens == 3 else None

    def plan(self, builder: PlanBuilder) -> None:
        assert self.attached
        self.plans += 1


def test_a_plain_run_imports_no_feature() -> None:
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    outside = ("engine.process.", "runner.host_inputs", "ops.triton", "router", "server", "tools")
    assert [n for n in names if n.removeprefix("quire.").startswith(outside)] == []
    features = [n for n in names if n.startswith("quire.features.") and n.count(".") > 2]
    # Declarations, and the files of a model's folder.
    data = (
        ".args", ".fields", ".model_settings", ".sentence_files", ".stats", ".messages", ".facts",
    )  # fmt: skip
    assert [n for n in features if not n.endswith(data)] == []


def test_a_request_turns_its_feature_on_while_others_run() -> None:
    made: list[Counting] = []

    def make() -> LoopFeature:
        made.append(Counting())
        return made[-1]

    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [64])
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    config = SimpleNamespace(
        args=SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs"),
        scheduler=scheduler,
    )
    entry = RequestedFeature(lambda params, options: options.get("cache_salt") == "asks", make)
    core = EngineCore(config, executor, requested=[entry])  # type: ignore[arg-type]
    core.add("plain", int32(range(5)), SamplingParams(), max_total=12)
    core.step()
    assert made == []
    core.add("asks", int32(range(5)), SamplingParams(), max_total=9, cache_salt="asks")
    core.add("again", int32(range(5)), SamplingParams(), max_total=9, cache_salt="asks")
    (feature,) = made
    before = core.telemetry.steps
    while core.has_work():
        core.step()
    assert feature.plans == core.telemetry.steps - before
    with pytest.raises(RequestError, match="no"):
        core.add("refused", int32(range(5)), SamplingParams(max_tokens=3), max_total=8)
    core.shutdown()


def test_a_feature_that_drafts_is_known_at_the_start() -> None:
    class Drafts(Feature):
        def lookahead(self, lanes: Int32, room: Int32) -> Int32:
            return room

    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [64])
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    config = SimpleNamespace(
        args=SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs"),
        scheduler=scheduler,
    )
    core = EngineCore(config, executor)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Drafts proposes drafts, so it must be known"):
        core.scheduler.add_feature(Drafts())


def test_hooks_with_columns_are_known_at_the_start(tmp_path: Path) -> None:
    class Keeps(Hook):
        def columns(self, limits: Limits) -> list[ColumnSpec]:
            return [ColumnSpec("kept")]

    engine = TinyEngine(model_folder(tmp_path / "model", TINY))
    with pytest.raises(QuireError, match="must be known when the runner starts"):
        engine.runner.add_hook(Keeps())


def test_a_runner_without_masks_refuses_plans_that_wait(tmp_path: Path) -> None:
    engine = TinyEngine(model_folder(tmp_path / "model", TINY), complete=False)
    engine.add("a", Job([6, 7, 8], SamplingParams(max_tokens=4)))
    plan = engine.scheduler.plan()
    assert plan is not None
    plan.flags = plan.flags | int32([RowFlag.GATED])
    with pytest.raises(QuireError, match="no hook makes a head wait"):
        engine.executor.submit(plan)
    with pytest.raises(QuireError, match="takes host inputs"):
        engine.executor.host_inputs()


def test_every_call_gives_the_same_in_any_order() -> None:
    prompts = ["Once upon a time", "The little dog"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    shaped = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[a-c]{4}"),
    )
    found = []
    for order in ((0, 1, 2), (2, 1, 0)):
        llm = LLM(**SETTINGS)
        calls = (
            lambda llm=llm: [o.outputs[0].text for o in llm.generate(prompts, greedy, False)],
            lambda llm=llm: [o.outputs[0].text for o in llm.generate(prompts, shaped, False)],
            lambda llm=llm: [
                o.outputs.embedding
                for o in llm.embed(prompts, False, pooling_params=PoolingParams(pooling="mean"))
            ],
        )
        results = {place: calls[place]() for place in order}
        results[3] = calls[0]()
        found.append([results[place] for place in range(4)])
        llm.shutdown()
    assert found[0][0] == found[0][3] == found[1][0] == found[1][3]
    assert found[0][1] == found[1][1]
    assert all(len(text) == 4 and set(text) <= set("abc") for text in found[0][1])
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_server_has_its_features_from_the_start() -> None:
    core = build_core(resolve(EngineArgs(**SETTINGS)))
    names = {type(feature).__name__ for feature in core._loop_features}
    requested = {"PoolingFeature", "GrammarFeature", "SamplersFeature", "RouterReplay"}
    assert names == {*requested, "WeightUpdates"}
    assert core._requested == []
    core.shutdown()
