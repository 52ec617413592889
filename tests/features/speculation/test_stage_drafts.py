"""Drafts in pipelines: with every method, tokens equal those of one worker without drafts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from quire.features.speculation.draft_model import DraftModel
from quire.features.speculation.feature import SpeculationFeature
from quire.features.speculation.stats import SourceStats
from tests.features.speculation.test_drafts import PARAMS, Answers, answers
from tests.features.speculation.test_speculation import DRAFT_SHAPE, EAGLE_SHAPE, MTP_SHAPE
from tests.local_stages import LocalStages
from tests.parallel.test_pipeline import HYBRID, MIXED
from tests.slow import slow
from tests.tiny_engine import TINY, Job, TinyEngine, model_folder, random_prompts

MODELS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "windows": MIXED,
    "states": HYBRID,
    "mtp": MTP_SHAPE,
    "untied": {**TINY, "tie_word_embeddings": False},
}
SHAPES = {"draft": DRAFT_SHAPE, "eagle3": EAGLE_SHAPE}
FEW = {"blocks": 34, "budget": 48}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@functools.cache
def plain(folder: Path) -> Answers:
    """Returns the answers of one worker without drafts."""
    return answers(TinyEngine(folder, dtype="float64"))


def engine(folder: Path, way: str, stages: int, depth: int, **settings: Any) -> TinyEngine:
    speculative: dict[str, Any] = {"num_speculative_tokens": 3, "lookup_min": 1}
    if way != "auto":
        speculative["method"] = way
    if way in ("auto", *SHAPES):
        shape = SHAPES.get(way, DRAFT_SHAPE)
        speculative["model"] = str(model_folder(folder.parent / f"for-{way}", shape))
    return TinyEngine(
        folder, dtype="float64", speculative=speculative, stages=stages, depth=depth,
        make_executor=LocalStages, **settings,
    )  # fmt: skip


def sources(found: TinyEngine) -> dict[str, SourceStats]:
    """Returns the counts of verified drafts, by source."""
    (feature,) = (f for f in found.features if isinstance(f, SpeculationFeature))
    return feature.stats()["speculation"].sources  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "model", "stages", "depth", "settings"),
    [
        ("suffix", "states", 2, 2, {}),
        slow("suffix", "tiny", 3, 4, FEW),
        ("draft", "windows", 3, 4, FEW),
        slow("draft", "states", 2, 3, {}),
        slow("auto", "tiny", 2, 3, FEW),
        slow("mtp", "mtp", 2, 2, {}),
        ("mtp", "mtp", 3, 4, {"blocks": 30, "budget": 48}),
        slow("eagle3", "windows", 2, 2, {}),
        ("eagle3", "untied", 3, 4, {"blocks": 30, "budget": 48}),
        slow("eagle3", "tiny", 2, 3, {"lanes": 3, "prefix_caching": False}),
    ],
)
def test_tokens_equal_those_without_drafts(
    base: Path, way: str, model: str, stages: int, depth: int, settings: dict[str, Any]
) -> None:
    """Greedy and sampled, penalties, siblings, chunked prompts, prefix hits, preemption, stop
    tokens, log-probabilities."""
    folder = model_folder(base / model, MODELS[model])
    found = engine(folder, way, stages, depth, **settings)
    assert answers(found) == plain(folder)
    assert sum(source.drafted for source in sources(found).values()) > 50
    assert settings.get("blocks") != 30 or found.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("depth", [2, slow(3)])
def test_a_draft_model_that_is_the_model_is_always_right(base: Path, depth: int) -> None:
    """With steps in flight, the model still drafts from the whole text: after prompts, accepted
    drafts, and steps without verified drafts."""
    folder = model_folder(base / "same", TINY)
    found = TinyEngine(
        folder, stages=2, depth=depth, make_executor=LocalStages,
        speculative={"method": "draft", "model": str(folder), "num_speculative_tokens": 3},
    )  # fmt: skip
    hooks = found.executor.last.sized.features
    (drafter,) = (hook for hook in hooks if isinstance(hook, DraftModel))
    drafter._model.load_state_dict(TinyEngine(folder).runner.model.state_dict())
    jobs = [Job(prompt, PARAMS[0]) for prompt in random_prompts(4, 30, seed=2)]
    found.run(jobs)
    own = sources(found)["draft"]
    assert own.accepted >= 0.9 * own.drafted > 0
