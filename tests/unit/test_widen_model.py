"""A widened model computes what the small one does, and never draws what it was padded with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire
from quire import LLM, SamplingParams

DRAFT = Path(quire.__file__).parent / "embedded" / "quire-tiny-draft"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "widen_model.py"
    spec = importlib.util.spec_from_file_location("widen_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft in float32, so that nothing is rounded away."""
    folder = tmp_path_factory.mktemp("small")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DRAFT / name).read_bytes())
    tensors = {name: t.float() for name, t in load_file(DRAFT / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def answers(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    llm = LLM(str(folder), num_kv_blocks=40, max_model_len=128, dtype="float32")
    prompts = ["Once upon a time, there was a", "The capital of France is"]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=8, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.shutdown()
    found = []
    for output in outputs:
        assert output.logprobs is not None
        lines = [sorted(e.logprob for e in line.values()) for line in output.logprobs]
        found.append((list(output.token_ids), torch.tensor(lines)))
    return found


def test_the_wide_model_says_the_same(tool: ModuleType, small: Path, tmp_path: Path) -> None:
    shape = tool.Shape(
        hidden=512, heads=6, kv_heads=2, layers=4, intermediate=300, vocab=6144 + 100
    )
    tool.widen(small, tmp_path / "wide", shape)
    for (tokens, logprobs), (wide_tokens, wide_logprobs) in zip(
        answers(small), answers(tmp_path / "wide"), strict=True
    ):
        assert tokens == wide_tokens
        torch.testing.assert_close(logprobs, wide_logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 256}, "4, 16"),
        ({"layers": 1}, "layers"),
        ({"heads": 3, "kv_heads": 2}, "multiple"),
        ({"hidden": 128, "vocab": 7000}, "larger hidden"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tool: ModuleType, small: Path, change: dict[str, int], message: str
) -> None:
    shape = {"hidden": 512, "heads": 4, "kv_heads": 1, "layers": 3, "intermediate": 256}
    with pytest.raises(ValueError, match=message):
        tool.Widener(small, tool.Shape(**{"vocab": 6144, **shape, **change}))
