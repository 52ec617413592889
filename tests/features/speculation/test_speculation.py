"""Speculation in whole engines: with every method, tokens equal those without drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import LLM, SamplingParams
from quire.features.speculation.feature import SpeculationFeature
from quire.features.speculation.lookup import TextIndex, TextMatch
from quire.features.speculation.settings import LOOKUP
from quire.features.speculation.stats import SpeculationStats
from quire.features.speculation.trials import Trials
from tests.features.speculation.test_drafts import PARAMS, Answers, answers
from tests.slow import slow
from tests.tiny_engine import TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

DRAFT_SHAPE = {**TINY, "hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 1}
MTP_SHAPE = {
    **TINY,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 1,
}
EAGLE_SHAPE = {
    **TINY,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [2, 1, 3],
}
EMBEDDED_DRAFT = str(Path(quire.__file__).parent / "embedded" / "quire-tiny-draft")
EMBEDDED_HEAD = str(Path(quire.__file__).parent / "embedded" / "quire-tiny-eagle3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("speculation")
    model_folder(base / "draft", DRAFT_SHAPE)
    return model_folder(base / "model", TINY)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    return answers(TinyEngine(folder, dtype="float64"))


def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of speculation. The draft model's weights are random, so its drafts are wrong."""
    draft = str(folder.parent / "draft")
    return {
        "suffix": {"method": "suffix", "lookup_min": 1},
        "draft": {"method": "draft", "model": draft},
        "auto": {"model": draft, "lookup_min": 1, "num_speculative_tokens": 3},
        "long": {"model": draft, "lookup_min": 1, "num_speculative_tokens": 12},
        "off": {"num_speculative_tokens": 0},
    }


SETTINGS = {
    "sync": {"depth": 1},
    "chunks": {"depth": 2, "budget": 48},
    "preempted": {"depth": 3, "blocks": 34},
    "lanes": {"depth": 2, "lanes": 3, "prefix_caching": False},
}
SAMPLED = {
    *(("auto", name) for name in ("sync", "preempted", "lanes")),
    *(("suffix", "sync"), ("suffix", "preempted"), ("draft", "chunks")),
    *(("long", "preempted"), ("off", "preempted")),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name) if (way, name) in SAMPLED else slow(way, name)
        for way in ("suffix", "draft", "auto", "long", "off")
        for name in SETTINGS
    ],
)
def test_tokens_and_logprobs_are_the_same(
    folder: Path, plain: Answers, way: str, name: str
) -> None:
    settings = SETTINGS[name]
    engine = TinyEngine(folder, dtype="float64", speculative=ways(folder)[way], **settings)
    assert answers(engine) == plain
    drafts = sum(int((plan.q_len[(plan.flags & 1) == 0] - 1).sum()) for plan in engine.plans)
    assert (drafts > 0) == (way != "off")
    if name == "preempted":
        assert engine.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_draft_heads_change_nothing(
    folder: Path, plain: Answers, tmp_path: Path, method: str
) -> None:
    """Draft heads of random weights, whose drafts are wrong; EAGLE-3 on two ranks."""
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    expected, settings = plain, {"depth": 3, "blocks": 30, "budget": 48}
    if method == "mtp":
        folder = model_folder(tmp_path, MTP_SHAPE)
        expected = answers(TinyEngine(folder, dtype="float64"))
    else:
        speculative["model"] = str(model_folder(tmp_path, EAGLE_SHAPE))
        settings["world"] = 2
    engine = TinyEngine(folder, dtype="float64", speculative=speculative, **settings)
    assert answers(engine) == expected
    assert any((plan.q_len[(plan.flags & 1) == 0] > 1).any() for plan in engine.plans)
    assert engine.scheduler.stats().preemptions > 0
    engine.executor.shutdown()


def many(seed: int) -> list[Job]:
    prompts = random_prompts(36, 40, seed=seed)
    return [
        Job(prompt, PARAMS[i % len(PARAMS)], seed=seed + i)
        for i, prompt in enumerate(prompts)
        if PARAMS[i % len(PARAMS)].prompt_logprobs is None
    ]


def test_many_requests_at_once(folder: Path) -> None:
    """Every request runs twice, so that the second half finds the first half's prefixes and
    texts."""
    jobs = many(3) * 2
    expected = TinyEngine(folder, dtype="float64", lanes=64, blocks=900).run(jobs)
    for way in ("suffix", "auto"):
        engine = TinyEngine(
            folder, dtype="float64", lanes=64, blocks=900, depth=2, speculative=ways(folder)[way]
        )
        assert engine.run(jobs) == expected


@pytest.mark.parametrize("count", [6, slow(12)])
def test_the_distribution_is_the_targets(folder: Path, count: int) -> None:
    """Chi-square of the third token over seeds, against an engine without speculation and other
    seeds: a two-sample test over the likeliest tokens, at a level of one in ten thousand."""
    params = SamplingParams(temperature=0.7, max_tokens=4, n=100, ignore_eos=True)

    def third(first: int, **settings: Any) -> Counter[int]:
        engine = TinyEngine(folder, dtype="float64", lanes=64, blocks=900, **settings)
        jobs = [Job([9, 8, 7, 9, 8, 7, 9], params, seed=first + i) for i in range(count)]
        return Counter(output[2] for output in engine.run(jobs))

    one = third(0)
    other = third(1000, depth=2, speculative=ways(folder)["auto"])
    common = [token for token, _ in one.most_common(12)]
    counts = np.array([[c[t] for t in common] for c in (one, other)], dtype=float)
    rest = np.array([[sum(c.values())] for c in (one, other)]) - counts.sum(1, keepdims=True)
    table = np.hstack([counts, rest])
    expected = table.sum(0) * table.sum(1, keepdims=True) / table.sum()
    chi_square = float(((table - expected) ** 2 / expected).sum())
    assert chi_square < 39.1  # 12 degrees of freedom


@pytest.mark.parametrize("method", ["draft", "suffix"])
def test_a_request_may_decline(folder: Path, method: str) -> None:
    engine = TinyEngine(folder, speculative={**ways(folder)["auto"], "method": "auto"})
    params = SamplingParams(temperature=0.0, max_tokens=20, speculative="off", ignore_eos=True)
    engine.run([Job([6, 7, 8, 6, 7, 8], params)])
    assert all((plan.q_len[(plan.flags & 1) == 0] == 1).all() for plan in engine.plans)
    with pytest.raises(quire.errors.RequestError, match="speculative"):
        SamplingParams(speculative=method)  # type: ignore[arg-type]


PROMPTS = [
    f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    for asked in ("Tell me a story about a little fox.", "Name three fruits.", "Who are you?")
]


def generated(**settings: Any) -> tuple[list[list[int]], SpeculationStats | None, int]:
    llm = LLM(num_kv_blocks=300, max_model_len=256, max_num_seqs=8, **settings)
    free_of_charge(llm)
    params = [
        SamplingParams(temperature=t, max_tokens=40, seed=3, ignore_eos=True)
        for t in (0.0, 0.0, 0.7)
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    stats = llm.stats()
    llm.shutdown()
    return [list(o.outputs[0].token_ids) for o in outputs], stats.speculation, stats.steps


@functools.cache
def generated_plainly(kv_cache_dtype: str) -> tuple[list[list[int]], int]:
    """Returns the tokens of an engine without drafts, and its steps."""
    found, nothing, steps = generated(kv_cache_dtype=kv_cache_dtype)
    assert nothing is None
    return found, steps


class EveryDraft(Trials):
    """Wants all drafts."""

    def wants_drafts(self, rows: int, gain: float) -> bool:
        return True


def free_of_charge(llm: LLM) -> None:
    """Makes drafts free, because costs measured on a busy machine would make these tests random."""
    from quire.features.speculation.draft_count import StepCosts

    for feature in llm._core._loop_features:
        if isinstance(feature, SpeculationFeature):
            feature._costs = StepCosts({})
            feature._trials = EveryDraft()


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": {"method": "draft"}},
        slow({"speculative_model": EMBEDDED_DRAFT, "steps_in_flight": 2}),
        {"speculative": {"method": "draft", "quantization": "int8"}, "kv_cache_dtype": "int8"},
        {"speculative": {"method": "eagle3"}},
    ],
    ids=["draft", "model", "kv8", "eagle3"],
)
def test_the_embedded_draft_is_accepted(settings: dict[str, Any]) -> None:
    expected, plain_steps = generated_plainly(settings.get("kv_cache_dtype", "auto"))
    found, stats, steps = generated(**settings)
    assert found == expected
    assert stats is not None
    method = settings.get("speculative", {}).get("method", "draft")
    source = stats.sources[method]
    assert source.accepted > 0.2 * source.drafted > 0
    assert source.accepted == sum(source.accepted_at)
    assert source.accepted_at == sorted(source.accepted_at, reverse=True)
    assert steps < 0.7 * plain_steps


@pytest.mark.parametrize("depth", [slow(1), 2])
def test_the_model_catches_up(depth: int) -> None:
    """A single request gets the model's drafts again after a long time of lookups."""
    llm = LLM(
        num_kv_blocks=100, max_model_len=512, max_num_seqs=2, speculative={}, steps_in_flight=depth
    )
    free_of_charge(llm)
    (feature,) = [f for f in llm._core._loop_features if isinstance(f, SpeculationFeature)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    told = llm._core.add("a", np.arange(40, 60, dtype=np.int32), params, max_total=130)
    found = TextIndex.find
    forced = pytest.MonkeyPatch()
    # At first every lookup finds the same wrong text.
    forced.setattr(TextIndex, "find", lambda text, tokens: TextMatch(text, 0, 16))
    forced.setattr(feature._acceptance, "of", lambda kinds, lanes: (kinds >= LOOKUP) * 0.9)
    for _ in range(30):
        llm._core.step()
    assert "draft" not in feature.stats()["speculation"].sources
    forced.undo()
    feature._settings = dataclasses.replace(feature._settings, lookup=False)
    assert TextIndex.find is found
    while llm._core.has_work():
        llm._core.step()
    assert told[0].num_output_tokens == 110
    drafts = feature.stats()["speculation"].sources["draft"]
    assert drafts.rows > 10
    assert drafts.accepted > 20
    llm.shutdown()


def test_grammars_hold_and_texts_are_followed() -> None:
    text = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    params = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs={"choice": [text]})
    found = []
    for settings in ({}, {"speculative": {}}):
        llm = LLM(num_kv_blocks=100, max_model_len=256, max_num_seqs=4, **settings)  # type: ignore[arg-type]
        free_of_charge(llm)
        output = llm.generate(f"{text}\nAgain:\n", params, use_tqdm=False)[0].outputs[0]
        assert output.text == text
        found.append((output.token_ids, llm.stats().steps))
        stats = llm.stats().speculation
        assert (stats is None) == (not settings)
        if stats is not None:
            assert stats.sources["suffix"].accepted > 10
        llm.shutdown()
    assert found[0][0] == found[1][0]
    assert found[1][1] < 0.6 * found[0][1]


def test_drafts_stay_within_a_salt() -> None:
    """Lookups use other requests' texts only with the same salt."""
    from quire.arrays import int32
    from quire.config import EngineArgs
    from quire.engine.builder import build_core, resolve

    args = EngineArgs(num_kv_blocks=100, max_model_len=128, speculative={"method": "suffix"})
    core = build_core(dataclasses.replace(resolve(args)), complete=False)
    prompt = int32([300, 301, 302, 303])
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=1, ignore_eos=True)

    def accepted(salt: str) -> int:
        def count() -> int:
            sources = core.stats().speculation.sources  # type: ignore[union-attr]
            return sum(source.accepted for source in sources.values())

        before = count()
        core.add("x", prompt, params, max_total=28, cache_salt=salt)
        while core.has_work():
            core.step()
        return count() - before

    from quire.features.speculation.draft_count import StepCosts

    for feature in core._loop_features:
        feature._costs = StepCosts({})  # type: ignore[attr-defined]
    first = accepted("a")
    assert accepted("b") == first
    assert accepted("a") > first + 10
    core.shutdown()


def test_texts_of_running_requests_are_followed(folder: Path) -> None:
    """A request with the same prompt as another gets its drafts from the other's cached blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    job = Job(random_prompts(1, seed=4)[0], params)
    expected = TinyEngine(folder, dtype="float64").run([job])[0]
    engine = TinyEngine(folder, dtype="float64", speculative={"method": "suffix"})
    (first,) = engine.add("first", job)
    while first.num_output_tokens < 40:
        engine.step()
    steps = len(engine.plans)
    (second,) = engine.add("second", job)
    while second.num_output_tokens < 30:
        engine.step()
    assert len(engine.plans) - steps < 12
    engine.drain()
    assert first.output.tolist() == second.output.tolist() == expected


def test_a_vocabulary_that_differs_is_refused(tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", {**DRAFT_SHAPE, "vocab_size": 2 * VOCAB})
    target = model_folder(tmp_path / "target", TINY)
    with pytest.raises(quire.errors.ConfigError, match="256 tokens, the model's 128"):
        LLM(str(target), speculative_model=str(other), load_format="dummy")
    short = model_folder(tmp_path / "short", {**DRAFT_SHAPE, "max_position_embeddings": 64})
    with pytest.raises(quire.errors.ConfigError, match="64 positions"):
        LLM(str(target), speculative_model=str(short), load_format="dummy")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle"}, "must be one of"),
        ({"method": "mtp", "model": "x"}, "no model"),
        ({"method": "draught"}, "must be one of"),
        ({"methods": "draft"}, "no key 'methods'"),
        ({"num_speculative_tokens": 17}, "0 to 16 or auto"),
        ({"num_speculative_tokens": "many"}, "0 to 16"),
        ({"lookup_min": 0}, "lookup_min"),
        ({"lookup_min": 9, "lookup_max": 8}, "lookup_max"),
        ({"quantization": "int2", "method": "draft"}, "quantization"),
        ({"quantization": "int8", "method": "suffix"}, "draft model"),
        ({"method": "suffix", "model": "x"}, "no model"),
        ({"model": 3}, "folder or hub id"),
        ({"simulate_acceptance": 2}, "simulate_acceptance"),
        ({"method": "draft", "model": EMBEDDED_HEAD}, "the model is an EAGLE-3 head"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(quire.errors.ConfigError, match=message):
        LLM(speculative=given)


def test_a_server_does_not_simulate() -> None:
    """Otherwise users of a server would get meaningless texts."""
    from quire.config import EngineArgs
    from quire.server.args import ServerArgs
    from quire.server.process.server import run_server

    engine = EngineArgs(speculative={"simulate_acceptance": 0.5})
    with pytest.raises(quire.errors.ConfigError, match="is for quire bench"):
        run_server(engine, ServerArgs(port=0))
