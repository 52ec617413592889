"""LoRA adapters that a trainer merges into the weights of an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.features.weight_updates.trainer import merged_weights
from tests.features.lora.peft_adapters import make_adapter, needs_peft
from tests.features.weight_updates.changed_models import GREEDY
from tests.models.checkpoints import make

PROMPT = list(range(20, 40))


@needs_peft
def test_a_merged_adapter(tmp_path: Path) -> None:
    import peft

    oracle = make(tmp_path / "model", "llama")
    make_adapter(oracle, tmp_path / "adapter", 3, r=4, lora_alpha=6, use_rslora=True)
    llm = LLM(
        str(tmp_path / "model"), skip_tokenizer_init=True, max_model_len=128, enable_lora=True
    )
    own = llm.generate([PROMPT], GREEDY, False)[0].outputs[0].token_ids
    adapted = peft.PeftModel.from_pretrained(oracle, str(tmp_path / "adapter")).eval()
    with torch.inference_mode():
        expected = adapted.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24, eos_token_id=-1,
            pad_token_id=0,
        )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert expected != own
    assert llm.update_weights(merged_weights(adapted), label="merged") == 1
    (output,) = llm.generate([PROMPT], GREEDY, False)
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].weight_versions == [(1, 24)]
    with pytest.raises(ValueError, match="no layer of the model has an adapter 'other'"):
        list(merged_weights(adapted, "other"))
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        list(merged_weights(adapted))
    llm.shutdown()


@needs_peft
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({}, None),
    ],
    ids=["dora", "bias", "whole-modules", "embeddings"],
)
def test_kinds_of_adapters(tmp_path: Path, fields: dict[str, Any], error: str | None) -> None:
    """All weights that an adapter changes are there, or the adapter is refused."""
    import peft

    oracle = make(tmp_path / "model", "llama")
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "embed_tokens"][: 1 + (error is None)])
    for name, value in fields.items():
        setattr(config, name, value)
    model = peft.get_peft_model(oracle, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if error is not None:
        with pytest.raises(ValueError, match=error):
            list(merged_weights(model))
        return
    found = dict(merged_weights(model))
    model.merge_adapter()
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    assert len(found) == len(layers)
    for name, layer in layers.items():
        merged = found[f"{name.removeprefix('base_model.model.')}.weight"]
        torch.testing.assert_close(merged, layer.base_layer.weight.detach())
