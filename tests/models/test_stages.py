"""Models in stages give the logits of one decoder, to the bit, and check checkpoints as
strictly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.models import (
    ForwardBatch,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.models.stages import StageDecoder, build_stage
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_parallel import PROMPTS
from tests.models.test_quantized_checkpoints import loaded

CASES = ["qwen3-tied-bias", "gpt2", "gemma2", "cohere2-bias", "gpt-oss", "qwen3-next-moe"]
QUANTIZED = ["gptq", "mxfp4", "w8a8"]


class Links:
    """Sends hidden states within the process."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self._sent.popleft())

    def send(self, hidden: Tensor) -> None:
        self._sent.append(hidden)


def stages_of(folder: Path, count: int) -> list[StageDecoder]:
    config, links = load_config(folder), Links()
    spec = spec_from_config(config)
    quantization = model_quantization(folder, config, spec, None)
    stages = [
        build_stage(
            spec, index, count, links, device="cpu", dtype=torch.float32, quantization=quantization
        )
        for index in range(count)
    ]
    for stage in stages:
        load_weights(stage, folder)
    return stages


class Chain:
    """All stages of a model, with the interface of a decoder for `Harness`."""

    def __init__(self, whole: Any, stages: Sequence[StageDecoder]) -> None:
        self.spec, self.dtype, self.device = whole.spec, whole.dtype, whole.device
        self.kv_groups, self.kv_layouts = whole.kv_groups, whole.kv_layouts
        self._stages = stages
        self.logits = stages[-1].logits

    def __call__(self, batch: ForwardBatch, kv: Sequence[Any]) -> Tensor:
        for stage in self._stages:
            hidden: Tensor = stage(batch, kv[stage.own.start : stage.own.stop])
        return hidden


@pytest.mark.parametrize("case", CASES + QUANTIZED)
def test_stages_give_the_tokens_of_one_decoder(case: str, tmp_path: Path) -> None:
    if case in QUANTIZED:
        make_quantized(tmp_path, case, "qwen3-moe" if case == "mxfp4" else "llama")
    else:
        make(tmp_path, case)
    whole, stages = loaded(tmp_path), stages_of(tmp_path, 3)
    chain: Any = Chain(whole, stages)
    assert Harness(chain).generate(PROMPTS, 6, chunk=5) == Harness(whole).generate(
        PROMPTS, 6, chunk=5
    )
    groups = [stage.kv_groups(4) for stage in stages]
    for index, group in enumerate(whole.kv_groups(4)):
        own = [found[index] for found in groups]
        assert sum((each.layers for each in own), ()) == group.layers
        assert sum(each.block_bytes for each in own) == group.block_bytes
        assert {each.kind for each in own} == {group.kind}


def test_every_stage_refuses_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file)
    spec = spec_from_config(load_config(tmp_path))
    for index in range(2):
        stage = build_stage(spec, index, 2, Links(), device="cpu", dtype=torch.float32)
        with pytest.raises(ModelError, match=r"missing tensor model.layers.2.mlp.up_proj.weight"):
            load_weights(stage, tmp_path)
