"""The known families. Adding one is a module in `families/` and a line here."""

from __future__ import annotations

from quire.models.families.family import Family
from quire.models.families.gpt2 import FAMILY as GPT2
from quire.models.families.llama import FAMILY as LLAMA
from quire.models.families.mistral import FAMILY as MISTRAL
from quire.models.families.qwen2 import FAMILY as QWEN2
from quire.models.families.qwen3 import FAMILY as QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {
    architecture: family for family in FAMILIES for architecture in family.architectures
}
