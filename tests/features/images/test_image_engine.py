"""Images in the engine: a stand-in's image must give what its tokens give as text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

import quire
from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.features.images import encoder_steps, feature, image_reader
from quire.features.images.feature import ImageFeature
from quire.features.images.hook import ImageHook
from quire.features.images.image_reader import ImageReader, PixelRoom
from quire.features.images.placement import image_ids
from quire.features.images.processor import ProcessorSettings
from quire.features.lora import LoRARequest
from quire.scheduler import PlanBuilder
from tests.features.images.stand_in import TOKEN_ID, PixelTokens, install, picture
from tests.slow import slow

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = list(range(40, 60))
EMBEDDED = Path(quire.__file__).parent / "embedded"


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(400, 900, count).tolist()


def with_images(*parts: list[int] | Any) -> dict[str, Any]:
    """Returns a prompt: lists are text, arrays are images."""
    ids: list[int] = []
    images = [part for part in parts if isinstance(part, np.ndarray)]
    for part in parts:
        ids += [TOKEN_ID] if isinstance(part, np.ndarray) else part
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[PixelTokens]:
    return install(monkeypatch)


@pytest.fixture
def llms() -> Iterator[Any]:
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        usual = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "image_cache_gb": 0.01}
        made.append(LLM(**(usual | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def out(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = llm.generate(prompts, params, use_tqdm=False)
    return [each.token_ids for output in found for each in output.outputs]


def test_an_image_gives_what_its_tokens_give(towers: list[PixelTokens], llms: Any) -> None:
    first, second = tokens(1, 24), tokens(2, 30)
    prompts = [
        with_images(TEXT, picture(first), TEXT),
        with_images(TEXT[:3], picture(first), [7], picture(second), TEXT),
        TEXT,
    ]
    texts = [TEXT + first + TEXT, TEXT[:3] + first + [7] + second + TEXT, TEXT]
    llm = llms()
    expected = out(llms(enable_prefix_caching=False), texts)
    assert out(llm, prompts) == expected
    assert towers[0].encoded == [24, 30]  # equal images are encoded once
    assert out(llm, prompts) == expected
    assert towers[0].encoded == [24, 30]  # the prefix cache has all of them
    assert llm.stats().images.images == 6


def test_streams_decode_while_images_are_encoded(
    towers: list[PixelTokens], llms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream, a step computes one layer of an image, and several steps an image."""
    monkeypatch.setattr(encoder_steps, "PART", 64)
    first, second = tokens(1, 24), tokens(2, 30)
    prompts = [
        TEXT,
        with_images(TEXT[:3], picture(first), [7], picture(second), TEXT[:4]),
        with_images(TEXT[:5], picture(second), [8]),
    ]
    texts = [TEXT, TEXT[:3] + first + [7] + second + TEXT[:4], TEXT[:5] + second + [8]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    expected = out(llms(enable_prefix_caching=False), texts, params)
    # The first step has room for the first prompt alone.
    llm = llms(max_num_batched_tokens=len(TEXT))
    assert out(llm, prompts, params) == expected
    assert towers[1].encoded == [24, 30]
    assert towers[1].parts == [(0, 1), (1, 2), (2, 3)] * 2
    # Without streams, the step that needs an image encodes the whole image.
    third = tokens(3, 40)
    out(llm, with_images(TEXT, picture(third), [9]))
    assert towers[1].parts[-1] == (0, 3)


def test_an_image_whose_request_ends_early(
    towers: list[PixelTokens], llms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the rest of an image that nobody needs, and its pixels are freed."""
    monkeypatch.setattr(encoder_steps, "PART", 64)
    llm = llms(max_num_batched_tokens=len(TEXT))
    core = llm._core
    opened = len(os.listdir("/proc/self/fd"))
    prompts = [TEXT, with_images(TEXT[:3], picture(tokens(1, 24)), [7])]
    jobs = [llm._job(prompt, GREEDY) for prompt in prompts]
    llm._start(jobs, [0, 0], [{}, {}])
    while not towers[0].parts:
        core.step()
    core.abort(jobs[1].output.request_id)
    del jobs, prompts
    while core.has_work():
        core.step()
    assert towers[0].parts == [(0, 1)]
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_step_beside_streams_keeps_to_its_room(
    towers: list[PixelTokens], llms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of a large image counts as several parts. No step computes one too many."""
    monkeypatch.setattr(encoder_steps, "PART", 64)
    monkeypatch.setattr(feature, "PART", 64)
    monkeypatch.setattr(feature, "layer_ranges", lambda layers, patches: [(0, 1), (1, 2), (2, 3)])
    llm = llms(max_num_batched_tokens=len(TEXT))
    own = next(each for each in llm._core._loop_features if isinstance(each, ImageFeature))
    own._table = replace(own._table, parts_a_step=3)
    plan, taken = own._plan_encoding, list[int]()

    def left() -> int:
        return sum(len(each.parts) for each in own._queue)

    def count(builder: PlanBuilder) -> None:
        before = left()
        plan(builder)
        taken.append(before - left())

    monkeypatch.setattr(own, "_plan_encoding", count)
    image = tokens(1, 128)  # Each layer counts as two parts.
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    out(llm, [TEXT, with_images(TEXT[:3], picture(image), [7])], params)
    assert [each for each in taken if each] == [1, 1, 1]


def test_a_burst_of_images_waits_for_room(towers: list[PixelTokens], llms: Any) -> None:
    """Requests that arrive at once do not all find room before the first has taken any."""
    reader = ImageReader(llms().config)
    reader._room = PixelRoom(1)

    async def go() -> int:
        part = PromptPart("image", picture(tokens(1, 24)), "image")
        loads = {asyncio.ensure_future(reader.load([part])) for _ in range(20)}
        await asyncio.sleep(0.2)
        found = sum(load.done() for load in loads)
        while loads:
            done, loads = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
            for load in done:
                load.result()[0].close()
        return found

    assert 0 < asyncio.run(go()) <= 2 * image_reader._THREADS


def test_memory_for_two_large_frames(towers: list[PixelTokens], llms: Any, tmp_path: Path) -> None:
    """A video of two frames may have larger groups than any image."""
    llm = llms(image_step_tokens=1)
    hook = ImageHook(llm.config)
    hook._config = SimpleNamespace(model_path=tmp_path)
    hook._processor = SimpleNamespace(
        settings=ProcessorSettings(16, 2, 2, 256, 25600, 1.0, (0.5,) * 3, (0.5,) * 3)
    )
    hook._tower = SimpleNamespace(workspace_bytes=lambda patches: patches)
    videos = tmp_path / "video_preprocessor_config.json"
    videos.write_text('{"size": {"shortest_edge": 256, "longest_edge": 25600}}')
    assert hook.reserved_bytes([], 0) == 100
    videos.write_text('{"size": {"shortest_edge": 256, "longest_edge": 102400}}')
    assert hook.reserved_bytes([], 0) == 200


def test_a_prompt_in_small_chunks(towers: list[PixelTokens], llms: Any) -> None:
    image = tokens(1, 40)
    prompts = [
        with_images(TEXT, picture(image, 4), TEXT),
        with_images(TEXT[:5], picture(image, 4), TEXT),
    ]
    texts = [TEXT + image + TEXT, TEXT[:5] + image + TEXT]
    expected = out(llms(enable_prefix_caching=False), texts)
    small = llms(max_num_batched_tokens=16)
    assert out(small, prompts) == expected
    assert towers[1].encoded == [40]


def test_a_step_encodes_images_up_to_its_budget(towers: list[PixelTokens], llms: Any) -> None:
    images = [tokens(seed, 20) for seed in range(6)]
    prompts = [with_images(TEXT, picture(image), TEXT) for image in images]
    expected = out(llms(), [TEXT + image + TEXT for image in images])
    llm = llms(image_step_tokens=45, max_num_seqs=8)
    assert out(llm, prompts) == expected
    assert towers[1].encoded == [20] * 6


def test_rows_for_embeddings_are_few(towers: list[PixelTokens], llms: Any) -> None:
    """Requests wait for rows, and an image whose rows are gone is encoded again."""
    images = [tokens(seed, 20) for seed in range(4)]
    prompts = [
        with_images(TEXT, picture(images[0]), TEXT, picture(images[1]), TEXT),
        with_images(TEXT[:4], picture(images[2]), TEXT, picture(images[3]), TEXT),
        with_images(TEXT[:7], picture(images[1]), TEXT, picture(images[2]), TEXT),
    ]
    texts = [
        TEXT + images[0] + TEXT + images[1] + TEXT,
        TEXT[:4] + images[2] + TEXT + images[3] + TEXT,
        TEXT[:7] + images[1] + TEXT + images[2] + TEXT,
    ]
    expected = out(llms(enable_prefix_caching=False), texts)
    rows = 25 * 320 * 4 / 1e9
    whole = llms(image_cache_gb=rows)
    assert out(whole, prompts) == expected
    assert out(whole, prompts[::-1]) == expected[::-1]
    llm = llms(image_cache_gb=rows, max_num_batched_tokens=24)
    assert out(llm, prompts) == expected
    assert llm.stats().images.cached_tokens <= 25
    with pytest.raises(RequestError, match="room for 25"):
        out(llm, with_images(TEXT, picture(tokens(9, 26)), TEXT))
    assert out(llm, TEXT) == out(llms(), TEXT)


def test_without_chunked_prefill(towers: list[PixelTokens], llms: Any) -> None:
    first, second = tokens(1, 24), tokens(2, 30)
    llm = llms(enable_chunked_prefill=False, image_step_tokens=1)
    found = out(llm, with_images(TEXT, picture(first), TEXT, picture(second), TEXT))
    assert found == out(llms(), [TEXT + first + TEXT + second + TEXT])


def test_preempted_requests_and_several_completions(towers: list[PixelTokens], llms: Any) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, n=2)
    images = [tokens(seed, 30) for seed in range(4)]
    prompts = [with_images(TEXT[:seed], picture(images[seed]), TEXT) for seed in range(1, 4)]
    texts = [TEXT[:seed] + images[seed] + TEXT for seed in range(1, 4)]
    expected = out(llms(), texts, params)
    llm = llms(num_kv_blocks=14, max_model_len=192)
    assert out(llm, prompts, params) == expected
    assert llm.stats().preemptions > 0
    assert llm.stats().images.pixel_bytes == 0


def test_no_match_ends_inside_an_image(towers: list[PixelTokens], llms: Any) -> None:
    image = tokens(1, 40)
    other = [*image[:-1], 401]
    llm = llms()
    out(llm, with_images(TEXT, picture(image), TEXT))
    (same,) = llm.generate(with_images(TEXT, picture(image), TEXT[::-1]), GREEDY, use_tqdm=False)
    assert same.num_cached_tokens == len(TEXT) + 40
    (cut,) = llm.generate(with_images(TEXT, picture(other), TEXT), GREEDY, use_tqdm=False)
    assert cut.num_cached_tokens == len(TEXT)
    assert cut.prompt_token_ids == TEXT + [TOKEN_ID] * 40 + TEXT
    assert out(llms(), TEXT + other + TEXT) == [cut.outputs[0].token_ids]


def test_ids_of_the_cache() -> None:
    ids = image_ids(b"digest", 40, 6144)
    assert ids.min() >= 6144
    assert len(set(ids.tolist())) == 40
    assert (image_ids(b"digest", 41, 6144)[:40] == ids).all()
    assert (image_ids(b"other", 40, 6144) != ids).all()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"dry_multiplier": 0.8, "dry_allowed_length": 2},
        {"prompt_logprobs": 2, "logprobs": 2},
    ],
)
def test_parameters_that_read_the_prompt(
    towers: list[PixelTokens], llms: Any, params: dict[str, Any]
) -> None:
    """The placeholder stands at each of the image's positions, and no id of the cache does."""
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, **params)
    llm = llms()
    prompt = with_images(TEXT, picture(tokens(1, 24)), TEXT)
    (first,) = llm.generate(prompt, asked, use_tqdm=False)
    (again,) = llm.generate(prompt, asked, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    for entry in (first.prompt_logprobs or [])[1:]:
        assert max(entry) < llm.config.vocab_size


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": {"method": "suffix", "lookup_min": 1}},
        slow({"speculative_model": str(EMBEDDED / "quire-tiny-draft")}),
        {"speculative_model": str(EMBEDDED / "quire-tiny-eagle3")},
    ],
)
def test_drafts(towers: list[PixelTokens], llms: Any, settings: dict[str, Any]) -> None:
    image = tokens(1, 24)
    prompts = [with_images(TEXT, picture(image), TEXT + TEXT)] * 2
    llm = llms(**settings)
    texts = out(llms(), [TEXT + image + TEXT + TEXT] * 2)
    assert out(llm, prompts) == texts
    assert out(llm, prompts) == texts


def test_a_disk_tier(towers: list[PixelTokens], llms: Any, tmp_path: Path) -> None:
    """A second engine finds the image's KV in files, and encodes nothing."""
    image = tokens(1, 40)
    prompt = with_images(TEXT, picture(image), TEXT)
    settings = {"host_cache_gb": 0.05, "disk_cache": str(tmp_path)}
    first = llms(**settings)
    expected = out(first, prompt)
    first.shutdown()
    second = llms(**settings)
    (found,) = second.generate(prompt, GREEDY, use_tqdm=False)
    assert [found.outputs[0].token_ids] == expected
    assert found.num_cached_tokens >= len(TEXT) + 40
    assert towers[1].encoded == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (with_images(TEXT, picture([1] * 9)), "must not end with an image"),
        ({"prompt_token_ids": TEXT, "multi_modal_data": {"image": picture([1] * 9)}}, "0 images"),
        (
            {"prompt_token_ids": [TOKEN_ID, 1], "multi_modal_data": {"image": ["not base64!"]}},
            r"multi_modal_data.image\[0\].*base64",
        ),
        (
            {"prompt_token_ids": [TOKEN_ID, 1], "multi_modal_data": {"audio": [b"x"]}},
            "'audio' are not supported",
        ),
        (with_images(*[picture([1] * 9)] * 3, TEXT), "at most 2 are allowed .--max-images"),
        (with_images(TEXT, picture([1] * 600), TEXT), "640"),
        ({"prompt_token_ids": [TOKEN_ID, 1], "multi_modal_data": [b"x"]}, "is a dict"),
    ],
)
def test_refusals(
    towers: list[PixelTokens], llms: Any, prompt: dict[str, Any], message: str
) -> None:
    llm = llms(max_images=2)
    with pytest.raises(RequestError, match=message):
        out(llm, prompt)
    assert out(llm, with_images(TEXT, picture([1] * 9), TEXT)) == out(llm, TEXT + [1] * 9 + TEXT)
    assert llm.stats().images.pixel_bytes == 0


def test_engines_without_images(towers: list[PixelTokens], llms: Any) -> None:
    llm = llms(language_model_only=True)
    with pytest.raises(RequestError, match="--language-model-only"):
        out(llm, with_images(TEXT, picture([1] * 9), TEXT))
    assert not towers


@pytest.mark.slow
def test_adapters(towers: list[PixelTokens], llms: Any, tmp_path: Path) -> None:
    """An adapter changes the language half, and its requests share no KV with others."""
    pytest.importorskip("peft")
    from tests.features.lora.peft_adapters import make_adapter

    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED / "quire-tiny")
    make_adapter(model, tmp_path / "one", 1, target_modules=["q_proj", "down_proj"])
    asked = LoRARequest("one", str(tmp_path / "one"))
    image = tokens(1, 24)
    llm = llms(enable_lora=True)

    def run(prompt: Any) -> Any:
        return llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=[asked, None])

    prompt, text = with_images(TEXT, picture(image), TEXT), TEXT + image + TEXT
    found = run([prompt, prompt])
    expected = run([{"prompt_token_ids": text}] * 2)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert found[0].outputs[0].token_ids != found[1].outputs[0].token_ids
    assert towers[0].encoded == [24]
