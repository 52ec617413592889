"""Tiny random checkpoints with a tokenizer, adapters, and draft models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.models import checkpoints
from tests.models.small_tokenizer import CHARACTERS

VOCAB = 211
EOS = 2
LENGTH = 128
"""The longest sequence of all engines."""
ADAPTERS = "one", "two", "three"

FAMILIES: dict[str, str] = {
    "llama": "llama",
    "llama-mqa-tied": "llama-mqa-tied",
    "qwen3-window": "qwen3-window",
    "mistral-window": "mistral-window",
    "gemma2": "gemma2",
    "gemma3": "gemma3-linear",
    "gpt-oss": "gpt-oss",
    "deepseek-v3": "deepseek-v3",
    "qwen3-moe": "qwen3-moe",
    "qwen3.5": "qwen3.5-order",
    "qwen3.5-mtp": "qwen3.5-mtp",
    "qwen3-next-mtp": "qwen3-next-mtp",
}
"""Cases of `checkpoints`, or of `test_draft_heads` where a layer drafts."""
MTP = "qwen3.5-mtp", "qwen3-next-mtp"
EXPERTS = "gpt-oss", "deepseek-v3", "qwen3-moe", "qwen3-next-mtp"
STATES = "qwen3.5", "qwen3.5-mtp", "qwen3-next-mtp"
WINDOWS = "qwen3-window", "mistral-window", "gemma2", "gemma3", "gpt-oss"
ADAPTED = tuple(family for family in FAMILIES if family not in EXPERTS and family not in MTP)
"""Families that adapters are made for."""


class Checkpoints:
    """Makes checkpoints in a folder, each when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, family: str) -> Path:
        """Returns the folder of a family's model; its adapters are next to it."""
        folder = self.folder / family
        if not (folder / "made").is_file():
            self._make(family, folder)
            (folder / "made").touch()
        return folder / "model"

    def adapter(self, family: str, name: str) -> Path:
        return self.model(family).parent / name

    def draft(self, family: str) -> Path:
        """Returns the folder of a draft model, which is the model with some noise, so that most
        drafts are right."""
        folder = self.model(family).parent / "draft"
        if not folder.is_dir():
            folder.mkdir()
            tensors = load_file(self.model(family) / "model.safetensors")
            draw = torch.Generator().manual_seed(3)
            for name, tensor in tensors.items():
                if tensor.dim() > 1:
                    noise = torch.randn(tensor.shape, generator=draw)
                    tensors[name] = tensor + 0.06 * tensor.std() * noise
            save_file(tensors, folder / "model.safetensors")
            config = (self.model(family) / "config.json").read_text()
            (folder / "config.json").write_text(config)
        return folder

    def _make(self, family: str, folder: Path) -> None:
        case = FAMILIES[family]
        if family in MTP:
            from tests.models import test_draft_heads as heads

            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(checkpoints.CASES, case, heads.CASES[case])
                names = {part: f"mtp.{name}" for part, name in heads.QWEN.items()}
                folder.mkdir(parents=True)
                heads.with_mtp(folder, case, "mtp.layers.0.", names)
        else:
            model = checkpoints.make(folder / "model", case)
            if family in ADAPTED:
                from tests.features.lora.peft_adapters import make_adapter

                for seed, name in enumerate(ADAPTERS):
                    make_adapter(model, folder / name, seed, r=2 + seed)
        save_words(folder / "model")


def save_words(folder: Path) -> None:
    """Writes a tokenizer of characters, bytes and pairs of letters. It encodes texts as characters,
    but a model may also generate the others. The model's vocabulary has some further tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": EOS}
    vocab.update({character: 3 + place for place, character in enumerate(CHARACTERS)})
    letters = "etaoinshrdlu"
    others = [f"<0x{byte:02X}>" for byte in "é日🙂".encode()]
    others += [a + b for a in letters for b in letters]
    vocab.update({other: len(vocab) + place for place, other in enumerate(others)})
    vocab = {word: id for word, id in vocab.items() if id < VOCAB - 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def eagle_head(base: Path) -> Path:
    """Returns the folder of an EAGLE-3 head of random weights."""
    from tests.models import test_draft_heads as heads

    folder = base / "eagle"
    if not folder.is_dir():
        settings: dict[str, Any] = {**heads.ORIGINAL, "max_position_embeddings": 256}
        heads.eagle_folder(folder, heads.random_head(False, "midlayer."), settings)
    return folder
