"""Every encoder gives the same hidden states and classes as transformers."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.models import Encoder, build_model, load_config, load_weights, spec_from_config
from tests.models.encoder_checkpoints import CASES, make

LENGTHS = (1, 9, 37, 9)


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


def load(folder: Path) -> Encoder:
    model = build_model(spec_from_config(load_config(folder)), device="cpu", dtype=torch.float32)
    load_weights(model, folder)
    assert isinstance(model, Encoder)
    return model


def texts_of(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 211) for _ in range(length)] for length in LENGTHS]


def packed(
    texts: list[list[int]], types: list[list[int]] | None = None, padding: int = 3
) -> ForwardBatch:
    """Returns a step of whole texts, with padding tokens behind them."""
    ends = [0, *itertools.accumulate(map(len, texts))]
    ids = [id for text in texts for id in text] + [0] * padding
    places = [place for text in texts for place in range(len(text))] + [0] * padding
    flat = None if types is None else [t for each in types for t in each] + [0] * padding
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(len(texts), 0, dtype=torch.int32)
    return ForwardBatch(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.tensor(places, dtype=torch.int32),
        query_start=torch.tensor(ends, dtype=torch.int32),
        seq_lens=lengths,
        groups=(GroupBatch(*nothing),),
        q_lens=tuple(lengths.tolist()),
        max_q_len=int(lengths.max()),
        max_seq_len=int(lengths.max()),
        token_types=None if flat is None else torch.tensor(flat, dtype=torch.int32),
    )


def hidden_of(model: Encoder, batch: ForwardBatch) -> list[Tensor]:
    with torch.inference_mode():
        states = model(batch, [None] * len(model.layers))
    return list(states[: sum(batch.q_lens)].split(list(batch.q_lens)))


def expected(oracle: Any, text: list[int], types: list[int] | None = None) -> Any:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        ids = torch.tensor([text])
        return oracle(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, **given)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_classes(case: str, tmp_path: Path) -> None:
    oracle, model = make(tmp_path, case), load(tmp_path)
    texts = texts_of(1)
    base = getattr(oracle, "base_model", oracle)
    for text, states in zip(texts, hidden_of(model, packed(texts)), strict=True):
        found = expected(base, text).last_hidden_state[0]
        torch.testing.assert_close(states, found, atol=1e-4, rtol=0.0)
        if model.classifier is None:
            continue
        head = model.spec.classifier
        assert head is not None
        pooled = states[:1] if head.pooling == "cls" else states.mean(0, keepdim=True)
        logits = expected(oracle, text).logits
        torch.testing.assert_close(model.classifier(pooled), logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("case", ["bert", "roberta-classes"])
def test_types_of_pairs(case: str, tmp_path: Path) -> None:
    oracle, model = make(tmp_path, case), load(tmp_path)
    texts = texts_of(2)
    types = [[int(place >= len(text) // 2) for place in range(len(text))] for text in texts]
    base = getattr(oracle, "base_model", oracle)
    for text, own, states in zip(texts, types, hidden_of(model, packed(texts, types)), strict=True):
        found = expected(base, text, own).last_hidden_state[0]
        torch.testing.assert_close(states, found, atol=1e-4, rtol=0.0)


def test_modernbert_of_transformers_4(tmp_path: Path) -> None:
    """Configurations had one key for each kind of layer, and no list of kinds."""
    oracle, _ = make(tmp_path, "modernbert"), load(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    config["global_attn_every_n_layers"] = 3
    file.write_text(json.dumps(config))
    texts = texts_of(3)
    for text, states in zip(texts, hidden_of(load(tmp_path), packed(texts)), strict=True):
        found = expected(oracle, text).last_hidden_state[0]
        torch.testing.assert_close(states, found, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"is_decoder": True}),
        ("bert", {"hidden_act": "relu"}),
        ("modernbert", {"classifier_activation": "relu", "architectures": ["X"]}),
        ("modernbert", {"layer_types": ["full_attention"]}),
        ("roberta", {"max_position_embeddings": 1}),
    ],
)
def test_what_is_not_implemented_is_refused(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path, case)
    with pytest.raises(ModelError, match=next(iter(changes)) if len(changes) == 1 else "unknown"):
        spec_from_config({**load_config(tmp_path), **changes})
