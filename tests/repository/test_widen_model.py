"""A widened model computes the same as the small one, and never draws a padding token."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire
from quire import LLM, SamplingParams
from quire.features.speculation.draft_count import StepCosts
from quire.features.speculation.feature import SpeculationFeature

DRAFT = Path(quire.__file__).parent / "embedded" / "quire-tiny-draft"


def load_tool(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("widen_model")


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


def test_a_widened_model_gives_the_same_tokens(
    tool: ModuleType, small: Path, tmp_path: Path
) -> None:
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
def test_impossible_shapes_are_refused(
    tool: ModuleType, small: Path, change: dict[str, int], message: str
) -> None:
    shape = {"hidden": 512, "heads": 4, "kv_heads": 1, "layers": 3, "intermediate": 256}
    with pytest.raises(ValueError, match=message):
        tool.Widener(small, tool.Shape(**{"vocab": 6144, **shape, **change}))


HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "vocab_size": 6144, "draft_vocab_size": 6144, "torch_dtype": "float32",
    "norm_before_fc": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]},
}  # fmt: skip


def random_head(folder: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    layer = {
        "self_attn.q_proj": (64, 256), "self_attn.k_proj": (32, 256), "self_attn.v_proj": (32, 256),
        "self_attn.o_proj": (128, 64), "mlp.gate_proj": (64, 128), "mlp.up_proj": (64, 128),
        "mlp.down_proj": (128, 64), "input_layernorm": (128,), "hidden_norm": (128,),
        "post_attention_layernorm": (128,),
    }  # fmt: skip
    shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (128, 256), "norm": (128,), "input_norm": (256,)}
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=rng) * 0.1 + float(len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HEAD))


def drafted(target: Path, head: Path) -> list[list[int]]:
    """Returns texts made of drafts alone, because every draft is accepted."""
    settings = {"method": "eagle3", "num_speculative_tokens": 3, "simulate_acceptance": 1.0}
    llm = LLM(
        str(target), num_kv_blocks=40, max_model_len=128, dtype="float32",
        speculative={**settings, "model": str(head)},
    )  # fmt: skip
    for feature in llm._core._loop_features:
        if isinstance(feature, SpeculationFeature):
            feature._costs = StepCosts({})
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["Once upon a time, there was a", "The capital of France is"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_widened_head_drafts_the_same_tokens(
    tool: ModuleType, small: Path, tmp_path: Path
) -> None:
    shape = tool.Shape(
        hidden=512, heads=6, kv_heads=2, layers=4, intermediate=300, vocab=6144 + 100
    )
    tool.widen(small, tmp_path / "wide", shape)
    random_head(tmp_path / "head")
    wide_head = tmp_path / "wide-head"
    load_tool("widen_head").widen_head(tmp_path / "head", small, wide_head, shape)
    assert drafted(small, tmp_path / "head") == drafted(tmp_path / "wide", wide_head)
