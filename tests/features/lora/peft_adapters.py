"""Random adapters of tiny checkpoints, made and evaluated by PEFT.

Functions import PEFT themselves: the import takes seconds, and processes that collect tests or run
ranks do not need it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs PEFT")


def linears(model: Any) -> list[str]:
    """Returns the last names of a model's linear layers, the head left out."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    if model.config.model_type == "qwen3_next":
        # PEFT takes the names of dense layers for those of experts there.
        names = [name for name in names if ".mlp." not in name]
    return sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})


def make_adapter(model: Any, folder: Path, seed: int, **config: Any) -> None:
    """Saves a random adapter for a transformers model, and leaves the model as it was."""
    import peft

    gpt2 = "GPT2" in type(model).__name__
    config.setdefault("target_modules", linears(model))
    config.setdefault("fan_in_fan_out", gpt2)
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.25)
    adapted.save_pretrained(str(folder))
    adapted.unload()


def logits(model: Any, folder: Path | None, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [n, vocab] of a text, with an adapter or without."""
    ids = torch.tensor([tokens])
    if folder is None:
        with torch.inference_mode():
            return model(ids).logits[0]
    import peft

    adapted = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.inference_mode():
        found = adapted(ids).logits[0]
    adapted.unload()
    return found


def change(folder: Path, **config: Any) -> None:
    """Changes keys of an adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def save(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "adapter_model.safetensors")
