"""A head in 8 bits: a separate copy if it is tied, exact in its format, sliced for ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import QUANTIZATIONS, EngineArgs
from quire.errors import ConfigError, ModelError
from quire.layers.build import Build
from quire.layers.embedding import LMHead
from quire.models.prepack import prepack_layer
from quire.models.stages import build_stage, stage_layers
from quire.ops.reference.quantized import dequantize
from quire.parallel import ProcessGroup, SingleGroup
from quire.quantization import quantization_of
from quire.quantization.rounding import FLOAT, FORMATS
from tests.gloo_ranks import on_ranks
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_quantized_checkpoints import PROMPT, loaded, logits
from tests.quantization.test_quantization import Share

STEP = {"int8": 1 / 254, "fp8": 1 / 16}
"""The largest error of a weight: of its output's largest, or of its own size."""


def test_every_name_has_a_format() -> None:
    assert {*FORMATS, FLOAT} == {name for name in QUANTIZATIONS if "=" not in name}
    heads = {name.removeprefix("head=") for name in QUANTIZATIONS if "=" in name}
    assert heads <= set(FORMATS)


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["qwen3", "gpt2", "llama-mqa-tied"])
def test_only_the_head_is_rounded(case: str, form: str, tmp_path: Path) -> None:
    make(tmp_path, case)
    plain, own = loaded(tmp_path), loaded(tmp_path, wanted=f"head={form}")
    assert plain.head.tied == (case != "qwen3")
    assert not own.head.tied
    assert own.head.weight.format == quantization_of(form).scheme_for("x", torch.float32).format
    shared = dict(plain.named_parameters())
    for name, parameter in own.named_parameters():
        if not name.startswith("head."):
            assert torch.equal(parameter, shared[name]), name
    exact, rounded = plain.head.weight.values, dequantize(own.head.weight, torch.float32)
    size = exact.abs().amax(1, keepdim=True) if form == "int8" else exact.abs()
    floor = 0.0 if form == "int8" else float(own.head.weight.scales.max()) * 2.0**-10
    assert ((rounded - exact).abs() <= size * STEP[form] * 1.001 + floor).all()
    # Logits equal the hidden states times the dequantized weights.
    expected, found = logits(plain), logits(own)
    hidden = torch.randn(5, plain.spec.hidden_size)
    wanted = hidden.double() @ dequantize(own.head.weight, torch.float64).T
    torch.testing.assert_close(own.head.logits(hidden).double(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_layers_and_the_head_have_formats_of_their_own(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    for wanted in ("int8,head=fp8", "head=fp8,int8"):
        own = loaded(tmp_path, wanted=wanted)
        assert own.head.weight.format.key == "float8_e4m3fn"
        assert own.layers[0].mlp.down.weight.format.key == "int8"


def test_layers_may_be_those_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    make_quantized(tmp_path, "w4a16")
    plain, own = loaded(tmp_path), loaded(tmp_path, wanted="head=int8")
    assert own.layers[0].mlp.down.weight.format == plain.layers[0].mlp.down.weight.format
    assert own.head.weight.format.key == "int8"
    with pytest.raises(ConfigError, match="quantization=int4: the checkpoint is quantized already"):
        loaded(tmp_path, wanted="int4,head=int8")


def test_a_checkpoint_may_bring_a_quantized_head(tmp_path: Path) -> None:
    """compressed-tensors counts the head as a `Linear`, unless it is ignored."""
    make_quantized(tmp_path, "w8a8-asym")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight").float()
    scales = head.abs().amax(1, keepdim=True) / 127
    tensors["lm_head.weight"] = (head / scales).round().to(torch.int8)
    tensors["lm_head.weight_scale"] = scales
    tensors["lm_head.weight_zero_point"] = torch.zeros(len(head), 1, dtype=torch.int8)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match="lm_head"):
        loaded(tmp_path)
    config["quantization_config"]["ignore"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = loaded(tmp_path)
    expected = tensors["lm_head.weight"].double() * scales.double()
    np.testing.assert_allclose(dequantize(own.head.weight, torch.float64), expected, rtol=1e-6)
    with pytest.raises(ConfigError, match="head=fp8: the checkpoint's head is quantized already"):
        loaded(tmp_path, wanted="head=fp8")


def test_a_tied_checkpoint_may_store_its_head_again(tmp_path: Path) -> None:
    make(tmp_path, "llama-mqa-tied")
    expected = logits(loaded(tmp_path, wanted="head=int8"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert torch.equal(logits(loaded(tmp_path, wanted="head=int8")), expected)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match="tied to the embeddings, but"):
        loaded(tmp_path, wanted="head=int8")


def test_the_last_stage_of_a_pipeline_needs_no_embeddings(tmp_path: Path) -> None:
    make(tmp_path, "llama-mqa-tied")
    model = loaded(tmp_path)
    for wanted, held in ((None, True), ("head=int8", False)):
        last = build_stage(
            model.spec, 1, 2, links=None, device="cpu",  # type: ignore[arg-type]
            quantization=quantization_of(wanted),
        )  # fmt: skip
        assert last.embedding.weight.is_meta != held
    assert stage_layers(model.spec, 2, quantization_of("head=int8"))


def _tokens(folders: list[Path], group: ProcessGroup) -> list[Any]:
    models = [loaded(folder, group, wanted="int8,head=int8") for folder in folders]
    return [Harness(model).generate([PROMPT, [11]], 12, chunk=5) for model in models]


def test_two_ranks_share_the_head(tmp_path: Path) -> None:
    folders = [tmp_path / case for case in ("qwen3", "gpt2")]
    for folder in folders:
        make(folder, folder.name)
        whole = loaded(folder, wanted="head=int8").head.weight
        assert whole.scales is not None
        for rank in range(2):
            own = loaded(folder, Share(rank, 2), wanted="head=int8").head.weight
            rows = -(-whole.outputs // 2)
            mine = whole.rows(rank * rows, min(whole.outputs, (rank + 1) * rows))
            assert own.scales is not None
            assert torch.equal(own.values[: mine.outputs], mine.values)
            assert torch.equal(own.scales[: mine.outputs], whole.scales[rank * rows :][:rows])
            assert not own.scales[mine.outputs :].any()
    expected = _tokens(folders, Share(0, 1))
    found = on_ranks(_tokens, folders, tmp_path)
    assert found == [expected, expected]


def test_an_unknown_format_for_the_head_is_refused(tmp_path: Path) -> None:
    for wrong in ("head=int4", "head=", "int8,head=w8a8", ""):
        with pytest.raises(ConfigError, match="w8a8_fp8, head=fp8, head=int8, got"):
            EngineArgs(quantization=wrong)
    for wrong in ("int8,int4", "head=int8,head=fp8", "int3"):
        with pytest.raises(ConfigError, match=f"unknown quantization '{wrong}'; give a format"):
            quantization_of(wrong)
    make_quantized(tmp_path, "w4a16")
    with pytest.raises(ConfigError, match="unknown quantization 'head=int8,head=int8'"):
        loaded(tmp_path, wanted="head=int8,head=int8")


def test_a_cpu_holds_a_tied_head_once() -> None:
    build = Build(SingleGroup(), quantization_of("head=int8"), torch.device("cpu"), torch.float32)
    head = LMHead(512, 512, build.within("head"))
    for part in head.slices():
        part.write(torch.randn(512, 512), 0)
    expected = dequantize(head.weight, torch.float64)
    prepack_layer(head)
    assert head.weight.values.is_meta
    hidden = torch.randn(3, 512)
    wanted = hidden.double() @ expected.T
    assert (head.logits(hidden) - wanted).norm() < 1e-3 * wanted.norm()


def test_an_engine_with_it_gives_logprobs_and_takes_drafts() -> None:
    """Both kinds compute logits of several positions per row, and drafts change no token."""
    settings: dict[str, Any] = {
        "device": "cpu", "quantization": "head=int8", "num_kv_blocks": 64,
        "max_num_batched_tokens": 128,
    }  # fmt: skip
    text = "One day a dog saw a ball. One day a dog saw a ball. One day"
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1)
    outputs = []
    for more in ({}, {"speculative": {"method": "suffix"}}):
        llm = LLM(**settings, **more)
        outputs.append(llm.generate([text], params)[0])
    plain, drafted = outputs
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids
    for output in outputs:
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
