"""A tokenizer for the tiny checkpoints: a token for each character."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


def save_tokenizer(folder: Path, characters: str = CHARACTERS) -> Tokenizer:
    """Writes the tokenizer to a model's folder, and returns it. Token ids begin at 3."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({character: 3 + place for place, character in enumerate(characters)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return tokenizer
