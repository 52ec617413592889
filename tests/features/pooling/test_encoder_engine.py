"""Encoders in an engine: vectors, classes and scores are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import ConfigError, ModelError, PromptTooLongError, RequestError
from tests.features.pooling.encoders import (
    SETTINGS,
    WORDS,
    change_config,
    encoder,
    tokenizer_of,
    write,
)
from tests.models.encoder_checkpoints import make

TEXTS = ["the fox sleeps", "a dog barks at night", "fox", "once upon a time there was a king"]


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


def many_texts(count: int, longest: int = 20) -> list[str]:
    draw = random.Random(count)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


def states_of(model: Any, ids: list[int], types: list[int] | None = None) -> Tensor:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([ids]), **given).last_hidden_state[0]
    return found


def unit(vector: Tensor) -> Any:
    return (vector / vector.norm()).numpy()


POOLS: dict[str, Any] = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "last": lambda states: states[-1],
}


@pytest.mark.parametrize("case", ["bert", "modernbert"])
def test_vectors_of_each_pooling(case: str, tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, case)
    llm = LLM(str(tmp_path), max_num_seqs=3, **SETTINGS)
    params = [PoolingParams(pooling=kind) for kind in POOLS]
    texts = TEXTS + many_texts(8)
    for number, text in enumerate(texts):
        found = llm.embed([text] * 4, pooling_params=params)
        states = states_of(model, hub.encode(text).ids)
        for own, kind in zip(found, POOLS, strict=True):
            wanted = unit(POOLS[kind](states))
            np.testing.assert_allclose(own.outputs.embedding, wanted, atol=1e-5, rtol=0)
        if number == 0:
            assert found[0].prompt_token_ids == hub.encode(text).ids
    together = llm.embed(texts)
    for own, text in zip(together, texts, strict=True):
        wanted = unit(states_of(model, hub.encode(text).ids).mean(0))
        np.testing.assert_allclose(own.outputs.embedding, wanted, atol=1e-5, rtol=0)
    assert not llm._core.has_work()


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (None, "mean"),
    ],
)
def test_published_pooling(stored: Any, kind: str, tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, "roberta", types=False)
    if stored is not None:
        write(tmp_path / "1_Pooling" / "config.json", stored)
    (own,) = LLM(str(tmp_path), **SETTINGS).embed(TEXTS[0])
    wanted = unit(POOLS[kind](states_of(model, hub.encode(TEXTS[0]).ids)))
    np.testing.assert_allclose(own.outputs.embedding, wanted, atol=1e-5, rtol=0)


def modules(folder: Path, *kinds: tuple[str, str]) -> None:
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{k}",
        }
        for index, (k, path) in enumerate((("Transformer", ""), *kinds))
    ]
    write(folder / "modules.json", entries)


def dense(folder: Path, inputs: int, outputs: int, *, bias: bool = True) -> dict[str, Tensor]:
    found = {"linear.weight": torch.randn(outputs, inputs)}
    if bias:
        found["linear.bias"] = torch.randn(outputs)
    activation = "torch.nn.modules.activation.Tanh" if bias else "torch.nn.modules.linear.Identity"
    write(folder / "config.json", {
        "in_features": inputs, "out_features": outputs, "bias": bias,
        "activation_function": activation,
    })  # fmt: skip
    save_file(found, folder / "model.safetensors")
    return found


def test_products_prompts_and_shorter_vectors(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, hub = encoder(tmp_path, "bert")
    modules(tmp_path, ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize"))
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    own = dense(tmp_path / "2_Dense", 48, 20)
    prompts = {"query": "the old ", "document": ""}
    write(tmp_path / "config_sentence_transformers.json",
          {"prompts": prompts, "default_prompt_name": "document"})  # fmt: skip
    change_config(tmp_path, matryoshka_dimensions=[8, 20])
    llm = LLM(str(tmp_path), **SETTINGS)

    def wanted(text: str, size: int = 20) -> Any:
        pooled = states_of(model, hub.encode(text).ids).mean(0)
        return unit(torch.tanh(own["linear.weight"] @ pooled + own["linear.bias"])[:size])

    def embedding(**params: Any) -> Any:
        return llm.embed("fox", pooling_params=PoolingParams(**params))[0].outputs.embedding

    np.testing.assert_allclose(embedding(), wanted("fox"), atol=1e-5, rtol=0)
    named = embedding(prompt_name="query")
    np.testing.assert_allclose(named, wanted("the old fox"), atol=1e-5, rtol=0)
    np.testing.assert_allclose(embedding(dimensions=8), wanted("fox", 8), atol=1e-5, rtol=0)
    with pytest.raises(RequestError, match="can have 8, 20 dimensions"):
        embedding(dimensions=9)
    with pytest.raises(RequestError, match="no prompt 'passage'; it has: query, document"):
        embedding(prompt_name="passage")
    with pytest.raises(RequestError, match="not token ids"):
        llm.embed([[1, 7, 2]], pooling_params=PoolingParams(prompt_name="query"))


def logits_of(model: Any, hub: Any, *texts: str) -> Tensor:
    tokens = hub.encode(*texts)
    with torch.inference_mode():
        found: Tensor = model(
            torch.tensor([tokens.ids]), token_type_ids=torch.tensor([tokens.type_ids])
        ).logits[0]
    return found


def test_classes(tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, "bert-classes")
    change_config(tmp_path, id2label={"0": "bad", "1": "fair", "2": "good"})
    llm = LLM(str(tmp_path), **SETTINGS)
    for own, text in zip(llm.classify(TEXTS), TEXTS, strict=True):
        wanted = logits_of(model, hub, text).softmax(0)
        np.testing.assert_allclose(own.probs, wanted, atol=1e-5, rtol=0)
        assert own.label == ["bad", "fair", "good"][int(wanted.argmax())]
        assert own.prompt_token_ids == hub.encode(text).ids
    with pytest.raises(RequestError, match="3 classes"):
        llm.score("fox", "dog")
    with pytest.raises(RequestError, match="classification head"):
        llm.embed("fox")


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_of_a_reranker(activation: str | None, tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, "bert-score")
    if activation is not None:
        change_config(tmp_path, sentence_transformers={"activation_fn": activation})
    llm = LLM(str(tmp_path), max_num_seqs=2, **SETTINGS)
    found = llm.score("a fox sleeps at night", TEXTS)
    for own, text in zip(found, TEXTS, strict=True):
        (logit,) = logits_of(model, hub, "a fox sleeps at night", text)
        wanted = logit if activation else logit.sigmoid()
        assert own.score == pytest.approx(float(wanted), abs=1e-5)
        assert own.num_prompt_tokens == len(hub.encode("a fox sleeps at night", text).ids)


def test_scores_without_token_types(tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, "xlm-r-score", types=False)
    (own,) = LLM(str(tmp_path), **SETTINGS).score("a fox", "the dog barks")
    (logit,) = logits_of(model, hub, "a fox", "the dog barks")
    assert own.score == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_scores_of_vectors(tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    llm = LLM(str(tmp_path), **SETTINGS)
    one, *others = (np.array(each.outputs.embedding) for each in llm.embed(["fox", *TEXTS]))
    for own, vector in zip(llm.score("fox", TEXTS), others, strict=True):
        assert own.score == pytest.approx(float(one @ vector), abs=1e-5)
    for wrong in ([[1, 7, 2]], [None], 5):
        with pytest.raises(RequestError, match="a text or a list of texts"):
            llm.score("fox", wrong)
    with pytest.raises(RequestError, match="2 and 4 texts"):
        llm.score(TEXTS[:2], TEXTS)
    with pytest.raises(RequestError, match="no classification head"):
        llm.classify("fox")


def test_scores_put_the_default_prompt_before_texts(tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    write(tmp_path / "config_sentence_transformers.json",
          {"prompts": {"query": "the old "}, "default_prompt_name": "query"})  # fmt: skip
    llm = LLM(str(tmp_path), **SETTINGS)
    one, other = (np.array(each.outputs.embedding) for each in llm.embed(["fox", "dog barks"]))
    (own,) = llm.score("fox", "dog barks")
    assert own.score == pytest.approx(float(one @ other), abs=1e-5)
    assert own.num_prompt_tokens == len(llm.get_tokenizer().encode("the old fox")) + len(
        llm.get_tokenizer().encode("the old dog barks")
    )


def late_vectors(model: Any, hub: Any, text: str, weight: Tensor) -> Tensor:
    vectors = states_of(model, hub.encode(text).ids) @ weight.T
    return vectors / vectors.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("layout", ["colbert", "pylate"])
def test_late_interaction(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(6)
    if layout == "pylate":
        model, hub = encoder(tmp_path, "modernbert")
        modules(tmp_path, ("Dense", "1_Dense"))
        weight = dense(tmp_path / "1_Dense", 48, 16, bias=False)["linear.weight"]
    else:
        model, hub = make(tmp_path, "bert"), tokenizer_of(tmp_path)
        weight = torch.randn(16, 48)
        named = {f"bert.{name}": value.clone() for name, value in model.state_dict().items()}
        save_file({**named, "linear.weight": weight}, tmp_path / "model.safetensors")
        change_config(tmp_path, architectures=["HF_ColBERT"], dim=16)
    llm = LLM(str(tmp_path), **SETTINGS)
    (own,) = llm.embed(TEXTS[0])
    wanted = late_vectors(model, hub, TEXTS[0], weight)
    np.testing.assert_allclose(own.outputs.embedding, wanted, atol=1e-5, rtol=0)
    for found, text in zip(llm.score(TEXTS[0], TEXTS), TEXTS, strict=True):
        score = (wanted @ late_vectors(model, hub, text, weight).T).amax(1).sum()
        assert found.score == pytest.approx(float(score), abs=1e-4)
    with pytest.raises(RequestError, match="not pooled"):
        llm.embed("fox", pooling_params=PoolingParams(pooling="mean"))


def test_the_longest_text(tmp_path: Path) -> None:
    """A prompt may have as many tokens as the model has positions."""
    model, _ = encoder(tmp_path, "roberta", types=False)
    llm = LLM(str(tmp_path), **SETTINGS)
    longest = llm.config.scheduler.max_model_len
    assert longest == 128  # 130 positions, of which the first two belong to padding.
    ids = [3 + place % 40 for place in range(longest)]
    (own,) = llm.embed([ids])
    wanted = unit(states_of(model, ids).mean(0))
    np.testing.assert_allclose(own.outputs.embedding, wanted, atol=1e-5, rtol=0)
    with pytest.raises(PromptTooLongError, match=r"length is 128 tokens\."):
        llm.embed([[*ids, 3]])
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32})
    assert LLM(str(tmp_path), **SETTINGS).config.scheduler.max_model_len == 32
    assert LLM(str(tmp_path), max_model_len=100, **SETTINGS).config.longest_prompt == 100


def test_int8_weights(tmp_path: Path) -> None:
    model, hub = encoder(tmp_path, "bert")
    (own,) = LLM(str(tmp_path), quantization="int8", **SETTINGS).embed(TEXTS[3])
    wanted = unit(states_of(model, hub.encode(TEXTS[3]).ids).mean(0))
    assert float(np.dot(own.outputs.embedding, wanted)) > 0.995


def test_nothing_is_generated(tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    llm = LLM(str(tmp_path), **SETTINGS)
    with pytest.raises(RequestError, match="generates no text"):
        llm.generate("fox", SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="generates no text"):
        llm.generate("fox", SamplingParams(max_tokens=3, logprobs=2))
    with pytest.raises(RequestError, match="generates no text"):
        llm.chat([{"role": "user", "content": "fox"}])
    assert len(llm.embed("fox")) == 1


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"num_kv_blocks": 8}, "num_kv_blocks"),
        ({"block_size": 32}, "block_size"),
        ({"deterministic": True}, "deterministic"),
        ({"enable_lora": True}, "enable_lora"),
        ({"speculative": "ngram"}, "speculative"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"max_model_len": 200}, "max_model_len"),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, Any], param: str, tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    with pytest.raises(ConfigError) as raised:
        LLM(str(tmp_path), **{**SETTINGS, **settings})
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
         "pooling_mode_cls_token, pooling_mode_max_tokens"),
        ("modules.json", [{"type": "sentence_transformers.models.WordWeights", "path": ""}],
         "WordWeights"),
        ("modules.json", [{"type": "x.Dense", "path": "../2_Dense"}], "outside"),
        ("modules.json", [{"type": "x.Pooling", "path": "a" * 5000}], "outside"),
        ("modules.json", [{"type": "x.Pooling", "path": "a\0b"}], "outside"),
        ("modules.json", [{"type": "x.Dense", "path": ""}, {"type": "x.Pooling", "path": ""}],
         "in this order"),
        ("modules.json", [{"type": "x.Normalize", "path": ""}, {"type": "x.Dense", "path": ""}],
         "in this order"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"default_prompt_name": []}, "none of its"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "none of its"),
    ],
)  # fmt: skip
def test_files_that_are_not_supported(file: str, content: Any, match: str, tmp_path: Path) -> None:
    encoder(tmp_path, "bert")
    write(tmp_path / file, content)
    # The Dense modules of these cases have their settings in the model's own config.json.
    change_config(tmp_path, in_features=48, out_features=48)
    with pytest.raises(ModelError, match=match):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"id2label": None, "num_labels": 2**31 - 1},
        {"problem_type": ["regression"]},
        {"sentence_transformers": {"activation_fn": 5}},
        {"sbert_ce_default_activation_function": ["Sigmoid"]},
    ],
)
def test_heads_that_are_not_supported(changes: dict[str, Any], tmp_path: Path) -> None:
    encoder(tmp_path, "bert-score")
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=r"num_labels|problem_type|activation_fn"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"out_features": 10**15}, "integers from 1"), ({"use_residual": True}, "use_residual")],
)
def test_products_that_are_not_supported(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    encoder(tmp_path, "bert")
    modules(tmp_path, ("Dense", "1_Dense"))
    write(tmp_path / "1_Dense" / "config.json", {"in_features": 48, "out_features": 20, **changes})
    with pytest.raises(ModelError, match=match):
        LLM(str(tmp_path), load_format="dummy", **SETTINGS)
