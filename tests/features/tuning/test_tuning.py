"""Measuring plans while an engine runs: the requested shapes, the times when work may run, the
saved plans, and the end of both processes. Without a GPU: times are made up."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import msgspec
from typer.testing import CliRunner

from quire import ops
from quire.cli.main import app
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.engine.loop.features import features_at_start
from quire.errors import ConfigError
from quire.features.tuning import feature, new_entries, table_process
from quire.features.tuning.feature import TableTuning
from quire.features.tuning.new_entries import make_entries, missing_shapes, pool_for
from quire.features.tuning.settings import open_tuning, served
from quire.features.tuning.step_counts import IdleTurn, StepCounts
from quire.features.tuning.table_order import TableOrder, products_of, shapes_as_json
from quire.models import build_model, spec_from_config
from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.products import plans, table
from quire.ops.triton.products.measure import Measured, preferred
from quire.ops.triton.products.plan import TORCH, GemmPlan, Shape
from quire.ops.triton.products.plans import sole_writer
from quire.ops.triton.products.table import PLANS, heuristic, key_of
from quire.ops.weight import WeightFormat
from tests.models.harness import Harness

CARD = "Card X"
H200 = DeviceTraits((9, 0), 132, 232448, pdl=True, bf16=True)
INT4 = WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128, zeros=True)
NARROW = Shape(3, 64, 256, torch.bfloat16, norm=True)
WIDE = Shape(8, 512, 256, torch.bfloat16, gated=True, format=INT4)
PLAN = GemmPlan("skinny", bm=16, bn=32, bk=64, norm="separate")

TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 320}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(table, "chosen", table.Chosen())
    monkeypatch.setattr(feature, "chosen", table.chosen)
    PLANS.forget()


def config_of(**settings: Any) -> EngineConfig:
    """Returns the embedded model's settings as resolved for a GPU."""
    device = settings.pop("device", "cuda")
    args = EngineArgs(**settings)
    return replace(_resolved(), args=args, device=device, dtype="bfloat16")


@functools.cache
def _resolved() -> EngineConfig:
    return resolve(EngineArgs(device="cpu"))


# -- what a model has, and what tables lack --------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
        ("Olmo2ForCausalLM", {}),
        ("Cohere2ForCausalLM", {"sliding_window": 8}),
        ("GPT2LMHeadModel", GPT2),
    ],
)
def test_the_listed_products_are_those_the_model_computes(
    architecture: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_from_config({**TINY, "architectures": [architecture], **more})
    model = build_model(spec, device="cpu", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    computed, linear = set(), ops.linear

    def noted(x: Any, weight: Any, bias: Any, residual: Any, norm: Any, act: Any) -> Any:
        gated = bool(act) and act.endswith("_and_mul")
        outputs = weight.outputs // (2 if gated else 1)
        computed.add(Shape(len(x), outputs, weight.inputs, x.dtype, norm is not None, gated))
        return linear(x, weight, bias, residual, norm, act)

    monkeypatch.setattr(ops, "linear", noted)
    harness = Harness(model)
    harness.step([(harness.add([1, 2, 3]), 3)])
    assert computed == set(products_of(model, [3]))


def test_missing_plans_are_measured_per_bucket_and_in_16_bits() -> None:
    PLANS.keep(CARD, {key_of(WIDE): PLAN})
    wide = NARROW._replace(dtype=torch.float32)
    many = NARROW._replace(m=300)
    assert missing_shapes([NARROW, NARROW._replace(m=4), WIDE, wide, many], CARD) == [
        NARROW._replace(m=4)
    ]


def test_choices_are_noted_by_where_they_came_from() -> None:
    PLANS.keep(CARD, {key_of(WIDE): PLAN})
    assert table.plan_for(WIDE, CARD, H200) == PLAN
    assert table.plan_for(NARROW, CARD, H200) == heuristic(NARROW, H200)
    assert table.chosen.measured == {key_of(WIDE)}
    assert table.chosen.by_rules == {key_of(NARROW): NARROW._replace(m=4)}


def test_an_order_survives_serialization() -> None:
    order = TableOrder(1, CARD, 5 << 30, 2, shapes_as_json([NARROW, WIDE]))
    back = msgspec.json.decode(msgspec.json.encode(order), type=TableOrder)
    assert back == order
    assert back.shapes() == [NARROW, WIDE]


def test_products_that_do_not_fit_in_memory_are_left_out() -> None:
    head = Shape(256, 151936, 4096, torch.bfloat16)
    assert pool_for([NARROW, head], 8 << 30) == ([NARROW, head], head.weight_bytes)
    few, pool = pool_for([NARROW, head], 2 << 30)
    assert few == [NARROW]
    assert pool == 320 << 20
    assert pool_for([NARROW, head], 1 << 29)[0] == []
    # Values in one format are drawn at random next to the others.
    assert pool_for([NARROW], 900 << 20)[0]
    assert pool_for([NARROW, NARROW._replace(format=INT4)], 900 << 20)[0] == []


# -- what is preferred, and kept -------------------------------------------------------------------


def test_default_plans_stay_where_no_plan_is_faster() -> None:
    rules, other = Measured(PLAN, 10.0), GemmPlan("gemv", bm=1)
    assert preferred([rules, Measured(other, 9.9)]) is rules
    assert preferred([rules, Measured(other, 9.0), Measured(TORCH, 9.5)]) == Measured(other, 9.0)
    broken = Measured(PLAN, float("inf"), "wrong")
    assert preferred([broken, Measured(TORCH, 12.0)]) == Measured(TORCH, 12.0)
    assert preferred([broken]) is None


def test_entries_are_merged_with_those_of_other_processes() -> None:
    PLANS.keep(CARD, {"a": PLAN})
    assert PLANS.entries(CARD) == {"a": PLAN}
    path = PLANS.keep("Card Y", {})
    PLANS.path(CARD).write_text(PLANS.dumps(CARD, {"b": TORCH}))
    PLANS.keep(CARD, {"c": PLAN})
    assert set(PLANS.entries(CARD)) == {"b", "c"}
    assert path != PLANS.path(CARD)


def test_a_table_of_other_sources_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANS.keep(CARD, {"a": PLAN})
    monkeypatch.setattr(plans, "sources_hash", lambda: "other")
    PLANS.forget()
    assert PLANS.entries(CARD) == {}


def test_one_process_measures_for_a_table() -> None:
    path = PLANS.path(CARD)
    with sole_writer(path) as first, sole_writer(path) as second:
        assert (first, second) == (True, False)
    with sole_writer(path) as third:
        assert third


class FakeTuner:
    """Times plans without a device. It fails for products of 64 outputs."""

    def __init__(self, device: Any, dtype: Any, pool: int, turn: Any) -> None:
        self.compiled: list[int] = []
        self._turn = turn

    def compile(self, shapes: Any, workers: int) -> None:
        self.compiled.append(len(list(shapes)))

    def tune_shape(self, shape: Shape) -> list[Measured[GemmPlan]]:
        if shape.n == 64:
            raise RuntimeError("no room")
        return self._turn(lambda: [Measured(PLAN, 10.0), Measured(TORCH, 5.0)])  # type: ignore[no-any-return]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_entries, "Tuner", FakeTuner)
    monkeypatch.setattr(table_process, "_room", lambda device, memory: memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("fake")
def test_each_plan_is_saved_at_once_and_failures_are_skipped() -> None:
    told: list[str] = []

    def note(shape: Shape, found: list[Measured[GemmPlan]]) -> None:
        PLANS.forget()
        assert key_of(shape) in PLANS.entries(CARD)
        told.append(key_of(shape))

    shapes = [WIDE, NARROW, WIDE._replace(m=1)]
    where = torch.device("cpu")
    found = make_entries(shapes, CARD, where, room=8 << 30, workers=1, report=note)
    assert found == (2, 0)
    assert told == [key_of(WIDE._replace(m=1)), key_of(WIDE)]


def order_of(*shapes: Shape, memory: int = 8 << 30) -> TableOrder:
    return TableOrder(0, CARD, memory, 1, shapes_as_json(shapes))


@pytest.mark.usefixtures("fake")
def test_plans_measured_by_another_process_are_not_measured_again() -> None:
    descriptor, counts = StepCounts.make()
    os.close(descriptor)
    PLANS.keep(CARD, {key_of(WIDE): TORCH})
    said = table_process.measure(order_of(WIDE, WIDE._replace(m=1)), counts)
    assert said.startswith("1 plans measured")
    assert "1 of them faster" in said
    assert str(PLANS.path(CARD)) in said
    assert set(PLANS.entries(CARD)) == {key_of(WIDE), key_of(WIDE._replace(m=1))}
    with sole_writer(PLANS.path(CARD)):
        assert "another process" in table_process.measure(order_of(NARROW), counts)
    assert "0 MiB" in table_process.measure(order_of(NARROW, memory=0), counts)


# -- when work may run -----------------------------------------------------------------------------


def test_background_work_waits_for_running_steps() -> None:
    descriptor, counts = StepCounts.make()
    other = StepCounts(descriptor)
    os.close(descriptor)
    turn = IdleTurn(other, lambda: None, quiet=0.05, pause=0.002)
    assert turn(lambda: 1) == 1
    counts.launch()
    counts.launch()
    counts.read()
    ran: list[float] = []
    thread = threading.Thread(target=turn, args=(lambda: ran.append(time.monotonic()),))
    thread.start()
    time.sleep(0.1)
    assert not ran
    assert other.idle_seconds == 0.0
    idle_from = time.monotonic()
    counts.read()
    thread.join(5)
    assert ran[0] - idle_from >= 0.045


def test_background_work_interrupted_by_a_step_is_repeated() -> None:
    descriptor, counts = StepCounts.make()
    os.close(descriptor)
    runs, settled = [], []

    def work() -> int:
        runs.append(1)
        if len(runs) < 3:
            counts.launch()
            counts.read()
        return len(runs)

    turn = IdleTurn(counts, lambda: settled.append(1), quiet=0.01, pause=0.001)
    assert turn(work) == 3
    assert len(settled) == 3


# -- the two processes -----------------------------------------------------------------------------

_CHILD = """
import json, os, sys
from quire.features.tuning.step_counts import StepCounts
order = json.loads(sys.stdin.readline())
counts = StepCounts(int(sys.argv[1]))
"""


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Any:
    """Returns a function that starts a feature with a child of this source, on no GPU."""
    properties = SimpleNamespace(total_memory=10 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    caplog.set_level(logging.INFO, "quire.tables")
    for each in (NARROW, WIDE):
        table.plan_for(each, CARD, H200)
    started = []

    def start(source: str) -> TableTuning:
        file = tmp_path / "child.py"
        file.write_text(_CHILD + textwrap.dedent(source))
        tuning = TableTuning(config_of(), [sys.executable, str(file)])
        assert tuning.start(None, None) is not None  # type: ignore[arg-type]
        started.append(tuning)
        return tuning

    yield start
    for tuning in started:
        tuning.close(None)


def _until(reached: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_engine_logs_missing_plans_and_their_measurement(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = engine(
        """
        while counts.launched < 2:
            pass
        print(len(order["products"]), order["card"], order["memory"] >> 20, "measured", flush=True)
        """
    )
    assert "2 of 2 products run by rules of thumb on Card X" in caplog.text
    tuning.before_submit()
    tuning.after_update(0)
    tuning.before_submit()
    _until(lambda: "2 Card X 1023 measured" in caplog.text)
    assert "ended (status" not in caplog.text


def test_a_measuring_process_that_dies_is_logged(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = engine("os.abort()")
    _until(lambda: "the process that measures plans ended (status -6)" in caplog.text)
    tuning.before_submit()
    tuning.after_update(0)
    tuning.close(None)


def test_an_engine_that_ends_takes_the_child_along(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = engine("import time; time.sleep(600)")
    began = time.monotonic()
    tuning.close(None)
    assert time.monotonic() - began < 60
    assert tuning._process is not None
    assert tuning._process.wait(5) < 0
    assert "ended" not in caplog.text
    tuning.close(None)


def test_the_process_ends_with_its_input() -> None:
    """The process ends even if the engine was killed without a message to it."""
    source = (
        "import sys, time; from quire.features.tuning import table_process as p\n"
        "p.measure = lambda *_: print('measuring', flush=True) or time.sleep(600)\n"
        "p.main(int(sys.argv[1]))\n"
    )
    descriptor, _ = StepCounts.make()
    process = subprocess.Popen(
        [sys.executable, "-c", source, str(descriptor)], pass_fds=[descriptor],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(descriptor)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(order_of(NARROW)) + b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"measuring\n"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def test_no_process_starts_if_all_plans_are_known(engine: Any) -> None:
    PLANS.keep(CARD, {key_of(NARROW): PLAN, key_of(WIDE): PLAN})
    tuning = TableTuning(config_of(), ["/none"])
    assert tuning.start(None, None) is None  # type: ignore[arg-type]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu"},
        {"enforce_eager": True},
        {"deterministic": True},
        {"disable": ("skinny",)},
    ],
)
def test_tuning_is_refused_where_no_tables_are_used(settings: dict[str, Any]) -> None:
    config = config_of(**settings)
    with pytest.raises(ConfigError, match="tune_tables=on: "):
        open_tuning(config)


def names(config: Any) -> list[Any]:
    return [entry.loop for entry in features_at_start(config, complete=True)]


def test_servers_measure_and_others_only_when_asked() -> None:
    assert isinstance(open_tuning(config_of(tune_tables="on")), TableTuning)
    plain, asked = config_of(), config_of(tune_tables="on")
    assert len(names(asked)) == len(names(plain)) + 1
    assert names(served(plain)) == names(served(asked)) == names(asked)
    assert served(config_of(device="cpu")).args.tune_tables == "off"
    off = config_of(tune_tables="off")
    assert served(off) is off
    assert names(off) == names(plain)
    with pytest.raises(ConfigError, match="one of auto, on, off"):
        config_of(tune_tables="maybe")


def test_tune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["tune"])
    assert isinstance(result.exception, ConfigError)
    assert "needs a GPU" in str(result.exception)
