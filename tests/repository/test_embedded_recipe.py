"""The embedded model's recipe: rules that judge answers, conversations, and models for training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "tools" / "embedded_model"


@pytest.fixture(scope="module")
def recipe() -> Iterator[dict[str, ModuleType]]:
    """Yields the recipe's modules by name; they are importable only meanwhile."""
    before = dict(sys.modules)
    sys.path.insert(0, str(RECIPE))
    names = "chat_score", "own_dialogues", "own_stories", "hybrid", "eagle", "model"
    yield {name: __import__(name) for name in names}
    sys.path.remove(str(RECIPE))
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RECIPE)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("rules", "answer", "passes"),
    [
        ({"has": ["five|5"]}, "Two plus three is five.", True),
        ({"has": ["five|5"]}, "Two plus three is six.", False),
        ({"has": ["no"], "lacks": ["^yes"]}, "Yes, no doubt.", False),
        ({"count": {"cat": 3}}, "A cat saw two cats. Cat!", True),
        ({"count": {"cat": 3}}, "A category of cats.", False),
        ({"members": {"fruit": 3}}, "Apples, pears and plums.", True),
        ({"members": {"fruit": 3}}, "Three fruits are apples, pears and plums.", True),
        ({"members": {"fruit": 3}}, "Three fruits are: apples, pears, plums.", True),
        ({"members": {"fruit": 3}}, "Apples, apples and pears.", False),
        ({"members": {"fruit": 3}}, "Apples, pears, plums and cats.", False),
        ({"members": {"fruit": 3}}, "I like fruits, apples and pears.", False),
    ],
)
def test_rules(
    recipe: dict[str, ModuleType], rules: dict[str, object], answer: str, passes: bool
) -> None:
    assert recipe["chat_score"].passes(rules, answer) == passes


def test_prompts(recipe: dict[str, ModuleType]) -> None:
    prompts = recipe["chat_score"].read_prompts()
    assert len(prompts) == 40
    assert all({"has", "count", "members"} & set(rules) for rules in prompts)


def test_conversations(recipe: dict[str, ModuleType]) -> None:
    rows = recipe["own_dialogues"].draw(400, random.Random(0))
    assert len({str(row) for row in rows}) > 390
    for row in rows:
        assert [m["role"] for m in row] == ["user", "assistant"] * (len(row) // 2)
        assert not any("{" in m["content"] or "  " in m["content"] for m in row)


def test_exchanging_animals_in_stories(recipe: dict[str, ModuleType]) -> None:
    exchange = recipe["own_stories"].exchange
    assert exchange("A dog met dogs. The Dog ran.", "dog", "owl") == "An owl met owls. The Owl ran."
    assert exchange("An owl's nest", "owl", "mouse") == "A mouse's nest"


def test_delta_rule_in_chunks(recipe: dict[str, ModuleType]) -> None:
    """A token at a time, over the beginning of a second document."""
    hybrid, rng = recipe["hybrid"], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 8, generator=rng, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay = -torch.rand(1, 2, 128, generator=rng, dtype=torch.float64)
    decay[..., 70] += hybrid.RESET
    strength = torch.rand(1, 2, 128, generator=rng, dtype=torch.float64)
    found = hybrid.delta_rule(q, k, v, decay, strength)
    for head in range(2):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(128):
            state = torch.zeros_like(state) if t == 70 else state * decay[0, head, t].exp()
            missing = v[0, head, t] - k[0, head, t] @ state
            state = state + strength[0, head, t] * torch.outer(k[0, head, t], missing)
            torch.testing.assert_close(found[0, head, t], q[0, head, t] @ state)


def test_head_sees_its_own_drafts(recipe: dict[str, ModuleType]) -> None:
    """One pass over a text gives the same drafts as running the head step by step on its own
    drafts."""
    eagle, model = recipe["eagle"], recipe["model"]
    torch.manual_seed(0)
    target = model.Shape(32, 2, 2, 1, 48, head_dim=16, vocab_size=50)
    head = eagle.EagleHead(target, eagle.HeadShape(head_dim=16, intermediate_size=24, taps=(1, 2)))
    tapped, embedded = torch.randn(1, 12, 64), torch.randn(1, 12, 32)
    document = torch.zeros(1, 12, dtype=torch.long)
    whole = head(tapped, embedded, document, 3)
    other = torch.randn(1, 12, 64)
    other[:, :8] = tapped[:, :8]
    # Only what the model computed up to position 7 counts for two drafts behind it.
    torch.testing.assert_close(head(other, embedded, document, 3)[2][:, 9], whole[2][:, 9])
    assert not torch.allclose(head(other, embedded, document, 3)[1][:, 9], whole[1][:, 9])
