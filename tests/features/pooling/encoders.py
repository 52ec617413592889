"""Folders of tiny encoders with tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.models.encoder_checkpoints import make

TEXT = (
    "a the fox dog king sleeps barks at night once upon time there was old river runs is not in "
    "under over white house and bird sings"
)
WORDS = tuple(TEXT.split())
SPECIAL = ("[MASK]", "[PAD]", "[CLS]", "[SEP]", "[UNK]")
SETTINGS: dict[str, Any] = {"device": "cpu", "seed": 0}


def tokenizer_of(folder: Path, *, types: bool = True) -> Tokenizer:
    """Writes a tokenizer of words, as BERT's frames texts and pairs, and returns it."""
    vocab = {word: id for id, word in enumerate((*SPECIAL, *WORDS))}
    hub = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    hub.add_special_tokens(list(SPECIAL))
    second = 1 if types else 0
    hub.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    hub.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return hub


def encoder(folder: Path, case: str, *, types: bool = True) -> tuple[Any, Tokenizer]:
    """Writes an encoder. Returns transformers' model and the tokenizer."""
    model = make(folder, case)
    return model, tokenizer_of(folder, types=types)


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
