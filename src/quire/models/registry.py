"""The known families. Adding one is a module in `families/` and a line here."""

from __future__ import annotations

import importlib

from quire.models.families.family import Family

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""The architectures of config.json, and the families whose modules build them."""


def family_named(name: str | None) -> Family | None:
    """Returns a family, whose module is imported when it is used; None: there is none."""
    if name not in ARCHITECTURES.values():
        return None
    family: Family = importlib.import_module(f"quire.models.families.{name}").FAMILY
    return family
