"""Reads a folder's tokenizer, and converts other formats to that of the `tokenizers` library."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from quire.errors import ModelError
from quire.system import MOST_TABLE, read_bounded
from quire.text.sentencepiece import CONTROL, USER, pair_tokenizer, read_pieces


def _byte_of() -> dict[str, int]:
    """Maps characters to the bytes that they stand for in byte-level BPE (Radford et al., 2019).

    Printable bytes stand for themselves, the others for U+0100 on, in order.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF = _byte_of()


# -- other formats: tiktoken's ranks, Mistral's tekken, and SentencePiece ----------------------

Config = Mapping[str, Any]
Converted = tuple[Tokenizer, dict[str, Any]]
"""A tokenizer, and the settings for tokenizer_config.json that its file implies."""

KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_PATTERNS = {"tokenization_kimi": (KIMI, 256), "tokenization_moonshot": (KIMI, 258)}
"""The pattern that splits text, and the number of special tokens after the ranks, by the module
that tokenizer_config.json names. Files of ranks contain neither."""
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of early tekken files, which do not list them."""
_MOST_SPECIAL = 1 << 16
_CHARS = {byte: char for char, byte in BYTE_OF.items()}


def convert(folder: Path, config: Config) -> tuple[str, dict[str, Any]]:
    """Converts a folder's tokenizer. Returns the text of a tokenizer.json, and the settings.

    Args:
        folder: folder of the model.
        config: content of tokenizer_config.json.

    Raises:
        ModelError: there is no tokenizer, or its format is not supported.
    """
    for name, read in _READERS.items():
        file = folder / name
        if not file.exists():
            continue
        try:
            tokenizer, named = read(file, config)
        except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"{file} cannot be read: {error!r}") from error
        return tokenizer.to_str(), {**named, **config}
    raise ModelError(
        f"{folder} has no tokenizer.json, nor {', '.join(_READERS)}. Name another folder with "
        "--tokenizer, or serve token ids only with --skip-tokenizer-init."
    )


def _tekken(file: Path, config: Config) -> Converted:
    """Reads Mistral's tekken.json, in which special tokens have the first ids."""
    content = json.loads(read_bounded(file, MOST_TABLE))
    settings = content["config"]
    count = settings["default_num_special_tokens"]
    if not 0 <= count <= _MOST_SPECIAL:
        raise ValueError(f"default_num_special_tokens {count}")
    given = content.get("special_tokens")
    special = {place: f"<SPECIAL_{place}>" for place in range(count)}
    if given is None:
        special |= dict(enumerate(_TEKKEN_SPECIAL[:count]))
    else:
        special |= {token["rank"]: token["token_str"] for token in given}
    words = sorted(content["vocab"], key=lambda token: token["rank"])
    words = words[: settings["default_vocab_size"] - count]
    ranks = [base64.b64decode(token["token_bytes"]) for token in words]
    texts = [special[place] for place in sorted(special)]
    tokenizer = _byte_pairs(ranks, settings["pattern"], before=texts)
    _begin(tokenizer, "<s>", config.get("add_bos_token", True))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, {name: text for name, text in names.items() if text in texts}


def _tiktoken(file: Path, config: Config) -> Converted:
    """Reads tiktoken's ranks. tokenizer_config.json must name one of the modules in `_PATTERNS`."""
    named = (config.get("auto_map") or {}).get("AutoTokenizer") or [""]
    module = str(named if isinstance(named, str) else named[0]).rpartition("--")[2].split(".")[0]
    if module not in _PATTERNS:
        raise ModelError(
            f"{file}: the file does not say how text is split, and tokenizer_config.json names no "
            f"module that is known ({', '.join(_PATTERNS)}); make a tokenizer.json of it with "
            "transformers (transformers.integrations.tiktoken)"
        )
    pattern, count = _PATTERNS[module]
    entries = (
        line.split()
        for line in read_bounded(file, MOST_TABLE).decode("ascii").splitlines()
        if line.strip()
    )
    ranks = {int(rank): base64.b64decode(token) for token, rank in entries}
    if sorted(ranks) != list(range(len(ranks))):
        raise ModelError(f"{file}: ranks must be 0, 1, 2 and so on")
    given = {int(id): _text(token) for id, token in config.get("added_tokens_decoder", {}).items()}
    ids = range(len(ranks), len(ranks) + count)
    behind = [given.get(id, f"<|reserved_token_{id}|>") for id in ids]
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    tokenizer = _byte_pairs([ranks[rank] for rank in range(len(ranks))], pattern, behind=behind)
    return tokenizer, {name: text for name, text in names.items() if text in behind}


def _sentencepiece(file: Path, config: Config) -> Converted:
    """Reads a SentencePiece model and the tokens that tokenizer_config.json adds to it."""
    pieces = read_pieces(file)
    tokenizer = pair_tokenizer(
        pieces.texts, pieces.scores, pieces.special.get("unk"), prefix=pieces.prefix
    )
    for kind in (CONTROL, USER):
        own = zip(pieces.texts, pieces.types, strict=True)
        _add(tokenizer, [text for text, found in own if found == kind], special=kind == CONTROL)
    given = {int(id): token for id, token in config.get("added_tokens_decoder", {}).items()}
    for id, token in sorted(given.items()):
        text, special = _text(token), isinstance(token, Mapping) and token.get("special", False)
        _add(tokenizer, [text], special=bool(special))
        if tokenizer.token_to_id(text) != id:
            raise ModelError(
                f"tokenizer_config.json: the token {text!r} has the id {id}, but would get "
                f"{tokenizer.token_to_id(text)}"
            )
    named = {f"{name}_token": pieces.texts[id] for name, id in pieces.special.items()}
    if "bos_token" in named:
        _begin(tokenizer, named["bos_token"], config.get("add_bos_token", True))
    return tokenizer, named


_READERS = {"tekken.json": _tekken, "tiktoken.model": _tiktoken, "tokenizer.model": _sentencepiece}


def _byte_pairs(
    ranks: Sequence[bytes], pattern: str, before: Sequence[str] = (), behind: Sequence[str] = ()
) -> Tokenizer:
    """Returns a byte-level BPE tokenizer, which merges the pair with the lowest rank first.

    Args:
        before: special tokens with ids before those of the ranks.
        behind: special tokens with ids after those of the ranks.

    Raises:
        ModelError: a token occurs twice.
    """
    known = {token: rank for rank, token in enumerate(ranks)}
    texts = ["".join(map(_CHARS.__getitem__, token)) for token in ranks]
    merges = []
    for token, text in zip(ranks, texts, strict=True):
        # Sorted by rank. The order among a token's own pairs does not matter.
        pairs = [at for at in range(1, len(token)) if token[:at] in known and token[at:] in known]
        pairs.sort(key=lambda at, token=token: (known[token[:at]], known[token[at:]]))  # type: ignore[misc]
        merges += [(text[:at], text[at:]) for at in pairs]
    vocabulary = {text: id for id, text in enumerate((*before, *texts, *behind))}
    if len(vocabulary) != len(before) + len(texts) + len(behind):
        raise ModelError("the tokenizer contains a token twice")
    # A piece that is a token as a whole is not merged.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, (*before, *behind), special=True)
    return tokenizer


def _add(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> None:
    """Adds tokens that are never split."""
    tokens = [AddedToken(text, special=special, normalized=False) for text in texts]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)


def _begin(tokenizer: Tokenizer, token: str, wanted: Any) -> None:
    """Makes every text begin with a token if `wanted`."""
    id = tokenizer.token_to_id(token)
    if wanted and id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"],
            pair=[token, "$A", token, "$B"],
            special_tokens=[(token, id)],
        )


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def tokenizer_files(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the text of a folder's tokenizer.json and the content of its tokenizer_config.json.
    Other formats are converted.

    Raises:
        ModelError: there is no tokenizer, or its format is not supported.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = json.loads(read_bounded(settings)) if settings.exists() else {}
    if file.exists():
        return read_bounded(file, MOST_TABLE).decode(), config
    return convert(folder, config)
