"""Drafts in graphs: with `deterministic`, the same results to the bit as without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.speculation.test_drafts import DRAFTS, Script, Verifier, jobs
from tests.tiny_engine import TINY, TinyEngine, model_folder


def run(folder: Path, script: Script | None = None, **settings: int) -> list[list[int]]:
    engine = TinyEngine(
        folder,
        hooks=[Verifier()],
        features=[] if script is None else [script],
        device="cuda",
        deterministic=True,
        **settings,  # type: ignore[arg-type]
    )
    requests = [r for i, job in enumerate(jobs()) for r in engine.add(str(i), job)]
    engine.drain()
    found = [request.tokens.view().tolist() for request in requests]
    if script is not None and script.kind == "right":
        generated = [n for step in engine.progress for n in step.n_tokens.tolist()]
        assert max(generated) == 1 + DRAFTS
    engine.executor.shutdown()
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_drafts_change_nothing_but_speed(tmp_path: Path, eager: bool) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    plain = run(folder, enforce_eager=eager)
    names = [f"{i}-{k}" for i, job in enumerate(jobs()) for k in range(job.params.n)]
    texts = dict(zip(names, plain, strict=True))
    for kind, settings in (
        ("right", {"depth": 1}),
        ("wrong", {"depth": 2}),
        ("partly", {"depth": 3, "budget": 48}),
        ("mixed", {"depth": 2, "blocks": 34}),
        ("late", {"depth": 3}),
    ):
        found = run(folder, Script(texts, kind), enforce_eager=eager, **settings)
        assert found == plain, (kind, settings)
