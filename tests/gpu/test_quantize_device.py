"""`quire quantize` and `quire eval perplexity` on a GPU: as on a CPU, but for rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config import EngineArgs
from quire.models import resolve_model_path
from quire.tools.evaluate import measure_perplexity
from quire.tools.quantize import Options, Recipe, quantize

OPTIONS = Options(samples=8, length=128, device="cuda", force=True)
RECIPES = {
    "gptq": {"group_size": 64},
    "awq": {"group_size": 64},
    "rtn": {"group_size": 64},
    "smoothquant": {},
    "fp8": {"group_size": 64},
}


@pytest.mark.parametrize("method", RECIPES)
def test_quantizing_on_a_gpu_gives_the_cpus_results(method: str, tmp_path: Path) -> None:
    source = resolve_model_path(None)
    recipe = Recipe.with_defaults(method, **RECIPES[method])
    found = quantize(source, "quire-tiny", tmp_path / "gpu", recipe, OPTIONS)
    on_cpu = replace(OPTIONS, device="cpu")
    expected = quantize(source, "quire-tiny", tmp_path / "cpu", recipe, on_cpu)
    assert found.perplexity_before == pytest.approx(expected.perplexity_before, rel=0.01)
    # If GPTQ rounds one weight differently, it compensates with other weights.
    near = 0.1 if method == "gptq" else 0.03
    assert found.perplexity_after == pytest.approx(expected.perplexity_after, rel=near)
    assert found.kl == pytest.approx(expected.kl, rel=0.5, abs=5e-3)
    assert found.errors.keys() == expected.errors.keys()
    for name, error in found.errors.items():
        assert error == pytest.approx(expected.errors[name], rel=0.3)


def test_perplexity(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a little dog who liked to run. " * 40, "utf-8")
    found = measure_perplexity(EngineArgs(device="cuda"), file, window=128)
    expected = measure_perplexity(EngineArgs(device="cpu"), file, window=128)
    assert found.nats == pytest.approx(expected.nats, rel=0.03)
    assert found.tokens == expected.tokens
