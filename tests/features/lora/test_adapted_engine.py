"""Adapters in a running engine: slots, versions, caches."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.arrays import int32
from quire.engine.loop.core import EngineCore
from quire.errors import ConfigError, RequestError
from quire.features.lora.adapter_pool import AdapterPool
from quire.features.lora.calls import LOAD, NAMES, UNLOAD, LoadAdapter
from quire.features.speculation.draft_count import StepCosts
from quire.features.speculation.feature import SpeculationFeature
from quire.request import Request
from tests.features.lora.peft_adapters import change, make_adapter, needs_peft, save, tensors
from tests.models.checkpoints import greedy, make

pytestmark = needs_peft

PROMPT = [5, 17, 99, 3, 42, 7, 7, 150, 23, 61, 8, 14, 77, 100, 2, 31, 19, 20]
TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model and six adapters, `0` to `5`."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make(folder / "model", "llama")
    for seed in range(6):
        make_adapter(model, folder / str(seed), seed, r=2 + seed)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    """Returns PEFT's continuations of the prompt by adapter, and the base model's as -1."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "model").eval()
    found = {-1: greedy(model, PROMPT, TOKENS)}
    for seed in range(6):
        adapted = peft.PeftModel.from_pretrained(model, str(checkpoint / str(seed))).eval()
        found[seed] = greedy(adapted, PROMPT, TOKENS)
        adapted.unload()
    assert len({tuple(tokens) for tokens in found.values()}) == 7
    return found


def open_llm(checkpoint: Path, **settings: Any) -> LLM:
    settings = {"enable_lora": True, "max_loras": 2, "block_size": 4, **settings}
    return LLM(
        str(checkpoint / "model"), skip_tokenizer_init=True, max_num_seqs=8, max_model_len=128,
        num_kv_blocks=200, **settings,
    )  # fmt: skip


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    engine = open_llm(checkpoint)
    yield engine
    engine.shutdown()


def asked(checkpoint: Path, adapters: Sequence[int]) -> list[LoRARequest | None]:
    return [None if a < 0 else LoRARequest(str(a), checkpoint / str(a)) for a in adapters]


def tokens_of(llm: LLM, checkpoint: Path, adapters: Sequence[int]) -> list[list[int]]:
    outputs = llm.generate(
        [PROMPT] * len(adapters), GREEDY, False, lora_request=asked(checkpoint, adapters)
    )
    return [output.outputs[0].token_ids for output in outputs]


def test_more_adapters_than_slots(
    llm: LLM, checkpoint: Path, expected: dict[int, list[int]]
) -> None:
    order = [0, -1, 1, 2, 0, 3, -1, 4, 5, 1, 0, 2]
    assert tokens_of(llm, checkpoint, order) == [expected[a] for a in order]
    # Again, from the prefix tree and from slots that other adapters used in between.
    order = order[::-1]
    assert tokens_of(llm, checkpoint, order) == [expected[a] for a in order]
    stats = llm.stats().adapters
    assert stats["resident"] == 2
    assert stats["known"] == stats["cached"] == 6
    assert stats["waiting"] == stats["failures"] == 0


def test_prefixes_are_shared_by_contents_only(
    llm: LLM, checkpoint: Path, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    def cached(request: LoRARequest | None) -> tuple[int, list[int]]:
        before = llm.stats().prefix_hit_tokens
        (output,) = llm.generate([PROMPT], GREEDY, False, lora_request=request)
        return llm.stats().prefix_hit_tokens - before, output.outputs[0].token_ids

    shutil.copytree(checkpoint / "0", tmp_path / "same")
    assert cached(None) == (0, expected[-1])
    assert cached(LoRARequest("a", checkpoint / "0")) == (0, expected[0])
    assert cached(LoRARequest("b", checkpoint / "1")) == (0, expected[1])
    hits, tokens = cached(LoRARequest("c", tmp_path / "same"))
    assert hits > 0
    assert tokens == expected[0]
    hits, tokens = cached(None)
    assert hits > 0
    assert tokens == expected[-1]


def replace_adapter(core: EngineCore, name: str, path: Path) -> None:
    answer = core.call(LOAD, LoadAdapter(name, str(path), in_place=True))
    while not answer.done():
        core.step()
        # A thread reads the adapter: without a pause the requests could end before it has.
        time.sleep(0.03)
    answer.result()


def start(core: EngineCore, name: str, adapter: str, prompt: Sequence[int] = PROMPT) -> Request:
    (request,) = core.add(
        name, int32(prompt), GREEDY, max_total=len(prompt) + TOKENS, adapter=adapter
    )
    return request


def finish(core: EngineCore) -> None:
    while core.has_work():
        core.step()
        assert not core.take_failures()


def test_requests_keep_the_version_they_began_with(
    checkpoint: Path, expected: dict[int, list[int]]
) -> None:
    llm = open_llm(checkpoint, max_loras=1)
    core = llm._core
    replace_adapter(core, "x", checkpoint / "0")
    old = start(core, "old", "x")
    while not old.num_output_tokens:
        core.step()
    replace_adapter(core, "x", checkpoint / "1")
    assert not old.finished
    new = start(core, "new", "x")
    core.call(UNLOAD, "x").result()
    with pytest.raises(RequestError, match="'x' does not exist") as refused:
        start(core, "late", "x")
    assert refused.value.code == "model_not_found"
    finish(core)
    assert old.output.tolist() == expected[0]
    assert new.output.tolist() == expected[1]
    llm.shutdown()


def test_loading_and_unloading_under_load(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    """One name stands for one adapter after another, while requests come and go."""
    llm = open_llm(checkpoint)
    core, draw = llm._core, random.Random(3)
    running: list[tuple[Request, int]] = []
    for turn in range(25):
        names = {}
        for name in "xy":
            names[name] = draw.randrange(6)
            replace_adapter(core, name, checkpoint / str(names[name]))
        for index in range(draw.randrange(4)):
            name = draw.choice(["x", "y", ""])
            request = start(core, f"{turn}.{index}", name)
            running.append((request, names.get(name, -1)))
        for _ in range(draw.randrange(6)):
            core.step()
        if draw.random() < 0.2 and running:
            aborted = draw.choice(running)
            if not aborted[0].finished:
                core.abort(aborted[0].request_id.rpartition("/")[0])
                running.remove(aborted)
    finish(core)
    for request, adapter in running:
        assert request.output.tolist() == expected[adapter]
    assert core.stats().adapters["waiting"] == 0
    assert not core._loop_features[-1]._bound  # type: ignore[attr-defined]
    llm.shutdown()


def test_a_slot_that_is_always_in_use_is_given_up(
    checkpoint: Path, expected: dict[int, list[int]]
) -> None:
    """A waiting request gets the slot, although requests for the adapter in it keep coming."""
    llm = open_llm(checkpoint, max_loras=1)
    core = llm._core
    for seed in (0, 1):
        replace_adapter(core, str(seed), checkpoint / str(seed))
    hot = [start(core, "hot", "0")]
    while not hot[0].num_output_tokens:
        core.step()
    cold = start(core, "cold", "1")
    for turn in range(400):
        core.step()
        if cold.finished:
            break
        if turn % 4 == 0 and len(hot) < 60:
            hot.append(start(core, f"hot{turn}", "0"))
    assert cold.finished
    assert not all(request.finished for request in hot)
    finish(core)
    assert cold.output.tolist() == expected[1]
    assert all(request.output.tolist() == expected[0] for request in hot)
    llm.shutdown()


def test_base_rows_are_those_of_an_engine_without_adapters(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    plain = open_llm(checkpoint, enable_lora=False, enable_prefix_caching=False)
    alone = plain.generate(prompts, params, False)
    with pytest.raises(RequestError, match="--enable-lora"):
        plain.generate([PROMPT], params, False, lora_request=asked(checkpoint, [0])[0])
    plain.shutdown()
    llm = open_llm(checkpoint, enable_prefix_caching=False)
    requests = asked(checkpoint, [0, -1, 1])
    llm.generate(prompts, params, False, lora_request=requests)
    # Both adapters are in their slots now, so all three start together.
    outputs = llm.generate(prompts, params, False, lora_request=requests)
    assert outputs[1].outputs[0].logprobs == alone[1].outputs[0].logprobs
    assert outputs[0].outputs[0].logprobs != alone[0].outputs[0].logprobs
    llm.shutdown()


def test_siblings_share_the_version(llm: LLM, checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=3, ignore_eos=True)
    request = asked(checkpoint, [2])[0]
    (one,) = llm.generate([PROMPT], params, False, lora_request=request)
    (again,) = llm.generate([PROMPT], params, False, lora_request=request)
    assert [o.token_ids for o in one.outputs] == [o.token_ids for o in again.outputs]


def test_an_adapter_whose_files_change_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint / "0", tmp_path / "a")
    llm = open_llm(checkpoint, max_loras=1, lora_cache_gb=0.0)
    core = llm._core
    for name, path in (("a", tmp_path / "a"), ("b", checkpoint / "1")):
        replace_adapter(core, name, path)
    save(tmp_path / "a", {n: 2 * t for n, t in tensors(tmp_path / "a").items()})
    request = start(core, "r", "a")
    failures = []
    while not failures:
        core.step()
        failures = core.take_failures()
    assert failures[0][0] is request
    assert "files have changed" in str(failures[0][1])
    finish(core)
    llm.shutdown()


def test_a_slot_that_cannot_be_filled_fails_its_request_at_once(
    checkpoint: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise MemoryError

    llm = open_llm(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr(AdapterPool, "_copy", failing)
        replace_adapter(llm._core, "0", checkpoint / "0")
        request = start(llm._core, "r", "0")
        while not (failures := llm._core.take_failures()):
            llm._core.step()
    assert failures[0][0] is request
    assert "could not be loaded" in str(failures[0][1])
    assert tokens_of(llm, checkpoint, [0, 1]) == [expected[0], expected[1]]
    llm.shutdown()


def test_a_folder_of_adapters(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    llm = open_llm(checkpoint, enable_lora=False, lora_dir=str(checkpoint))
    core = llm._core
    assert core.news()[NAMES] == [str(seed) for seed in range(6)]
    requests = [start(core, str(seed), str(seed)) for seed in range(6)]
    finish(core)
    assert [r.output.tolist() for r in requests] == [expected[seed] for seed in range(6)]
    for name in ("model", "..", "../adapters/0", "7", "0/."):
        with pytest.raises(RequestError, match="does not exist"):
            start(core, "r", name)
    llm.shutdown()


def test_settings(checkpoint: Path, tmp_path: Path, expected: dict[int, list[int]]) -> None:
    llm = open_llm(checkpoint, enable_lora=False, lora=(f"x={checkpoint / '3'}",))
    request = start(llm._core, "r", "x")
    finish(llm._core)
    assert request.output.tolist() == expected[3]
    llm.shutdown()
    for settings, message in [
        ({"lora": ("x",)}, "NAME=PATH"),
        ({"lora": (f"x={tmp_path}",)}, "adapter_config.json cannot be read"),
        ({"lora_dir": str(tmp_path / "none")}, "there is no folder"),
        ({"max_lora_rank": 257}, "at most 256"),
        ({"max_loras": 0}, "at least 1"),
        ({"max_loras": 300_000, "max_lora_rank": 256}, "there is no room for max_loras=300000"),
        ({"lora_cache_gb": -1.0}, "lora_cache_gb"),
        ({"lora": (f"x={checkpoint / '5'}",), "max_lora_rank": 4}, "rank 7 is more than"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_llm(checkpoint, **settings)


def test_requests_of_llm_are_checked(llm: LLM, checkpoint: Path) -> None:
    (request,) = asked(checkpoint, [0])
    with pytest.raises(RequestError, match="1 prompts but 2"):
        llm.generate([PROMPT], GREEDY, False, lora_request=[request, None])
    with pytest.raises(RequestError, match="is a LoRARequest"):
        llm.generate([PROMPT], GREEDY, False, lora_request="0")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not empty"):
        LoRARequest("", "path")
    llm.generate([PROMPT], GREEDY, False, lora_request=request)
    with pytest.raises(RequestError, match="already been loaded"):
        llm.generate([PROMPT], GREEDY, False, lora_request=LoRARequest("0", checkpoint / "1"))


def test_change_of_config_is_another_adapter(
    llm: LLM, checkpoint: Path, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    shutil.copytree(checkpoint / "0", tmp_path / "twice")
    change(tmp_path / "twice", lora_alpha=16)
    request = LoRARequest("twice", tmp_path / "twice")
    (output,) = llm.generate([PROMPT], GREEDY, False, lora_request=request)
    assert output.outputs[0].token_ids != expected[0]


def test_two_ranks_fill_their_slots_together(
    checkpoint: Path, expected: dict[int, list[int]]
) -> None:
    llm = open_llm(checkpoint, tensor_parallel_size=2, device="cpu")
    order = [0, -1, 1, 2, 0, 3]
    assert tokens_of(llm, checkpoint, order) == [expected[a] for a in order]
    assert llm.stats().adapters["loads"] >= 4
    llm.shutdown()


def test_an_adapter_of_the_hub(
    checkpoint: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are downloaded from the hub once, while other requests run."""
    came, asked_for = threading.Event(), []

    def fetched(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked_for.append((name, allow_patterns))
        assert came.wait(60)
        return str(checkpoint / "3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    llm = open_llm(checkpoint)
    core = llm._core
    message = LoadAdapter("x", "some/adapter", known=True)
    answer = core.call(LOAD, message)
    assert not core.news()[NAMES]
    other = start(core, "other", "")
    while not other.num_output_tokens:
        core.step()
    came.set()
    while not answer.done():
        core.step()
    answer.result()
    assert core.call(LOAD, message).done()
    assert asked_for == [("some/adapter", ["adapter_config.json", "adapter_model.safetensors"])]
    request = start(core, "r", "x")
    finish(core)
    assert request.output.tolist() == expected[3]
    llm.shutdown()
    llm = open_llm(checkpoint, enable_lora=False, lora=("y=some/adapter",))
    assert llm._core.news()[NAMES] == ["y"]
    llm.shutdown()


def test_a_name_is_loaded_once_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load of a name reserves it, even before the load has ended; an unload frees it."""
    came = threading.Event()

    def fetched(name: str, **_: Any) -> str:
        assert came.wait(60)
        return str(checkpoint / "3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    llm = open_llm(checkpoint)
    core = llm._core

    def load(path: str, **how: bool) -> Future[None]:
        answer: Future[None] = core.call(LOAD, LoadAdapter("x", path, **how))
        return answer

    def unload() -> None:
        core.call(UNLOAD, "x").result()

    folder = str(checkpoint / "0")
    for first, second in [("some/adapter", folder), (folder, "some/adapter"), (folder, folder)]:
        answer = load(first)
        with pytest.raises(RequestError, match="has already been loaded"):
            load(second).result(0)
        assert load(first, known=True) is answer
        unload()
        with pytest.raises(RequestError, match="'x' was unloaded before") as given_up:
            answer.result(0)
        assert given_up.value.code == "adapter_unloaded"
        with pytest.raises(RequestError, match="cannot be found"):
            unload()
    answer, replacing = load("some/adapter"), load(folder, in_place=True)
    came.set()
    while not (answer.done() and replacing.done()):
        core.step()
    assert answer.exception() is replacing.exception() is None
    unload()
    core.step()
    assert not core.news()[NAMES]
    llm.shutdown()


def test_an_adapter_that_the_hub_does_not_have(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(name: str, **_: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    llm = open_llm(checkpoint)
    with pytest.raises(RequestError, match="some/adapter is not a local folder, and it could not"):
        llm.generate([PROMPT], GREEDY, False, lora_request=LoRARequest("x", "some/adapter"))
    assert llm.stats().adapters["failures"] == 1
    llm.generate([PROMPT], GREEDY, False)
    llm.shutdown()
    with pytest.raises(ConfigError, match="lora 'y': some/adapter is not a local folder"):
        open_llm(checkpoint, enable_lora=False, lora=("y=some/adapter",))


@pytest.mark.parametrize(
    "settings", [{"method": "suffix", "lookup_min": 1}, {"method": "draft"}], ids=str
)
def test_drafts_change_no_adapters_tokens(
    checkpoint: Path, expected: dict[int, list[int]], settings: dict[str, Any]
) -> None:
    """Drafts come from texts or the base model, and any adapter verifies them."""
    if settings["method"] == "draft":
        settings = {**settings, "model": str(checkpoint / "model")}
    llm = open_llm(checkpoint, max_loras=3, speculative={**settings, "num_speculative_tokens": 3})
    for feature in llm._core._loop_features:
        if isinstance(feature, SpeculationFeature):
            feature._costs = StepCosts({})  # all drafts pay
    adapters = [-1, 0, 4, 1, 0, -1]
    assert tokens_of(llm, checkpoint, adapters) == [expected[a] for a in adapters]
    stats = llm.stats().speculation
    assert stats is not None
    assert sum(source.drafted for source in stats.sources.values()) > 10
    llm.shutdown()


def test_kv_in_8_bits(checkpoint: Path) -> None:
    """A batch of several adapters has the tokens of each alone."""
    adapters = [-1, 0, 4, 1, 0]
    llm = open_llm(checkpoint, max_loras=3, kv_cache_dtype="int8", enable_prefix_caching=False)
    alone = [tokens_of(llm, checkpoint, [adapter])[0] for adapter in adapters]
    assert tokens_of(llm, checkpoint, adapters) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    llm.shutdown()
