"""Tokenization through the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HubTokenizer

from quire.arrays import Int32, int32
from quire.errors import ModelError, RequestError
from quire.system import read_bounded
from quire.text import tokenizer_files
from quire.text.chat_template import ChatTemplate, TemplateTraits, load_templates
from quire.text.ends import set_ends
from quire.text.pieces import cut_at_gaps, separates_words
from quire.text.template_traits import probe
from quire.text.tokenizer_files import BYTE_OF


def tokenizer_error(error: BaseException, what: str) -> RequestError:
    """Returns a RequestError for an error of the `tokenizers` library.

    The library panics if a tokenizer's pattern fails, and a panic is no `Exception`. Other
    BaseExceptions, such as KeyboardInterrupt, are raised unchanged.

    Args:
        error: the library's error.
        what: beginning of the message, such as "the text cannot be tokenized".
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return RequestError(f"{what}: {error}", "prompt")


_MAX_COMPILED = 8

_SAMPLE = "A text of words, 1 or 2 numbers, and ünïcödé. " * 50

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class Tokenizer:
    """A model's tokenizer, special tokens and chat templates.

    They come from the files of the model's folder, see `tokenizer_files`.
    """

    def __init__(
        self,
        hub: HubTokenizer,
        config: Mapping[str, Any],
        templates: Mapping[str, str] | None = None,
    ) -> None:
        # These settings are for training and would silently truncate or pad prompts.
        hub.no_truncation()
        hub.no_padding()
        self.hub = hub
        self.config = config
        self.special_tokens = {
            name: text for name in _NAMED if (text := _content(config.get(name))) is not None
        }
        self.chat_templates = dict(templates or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self._traits: weakref.WeakKeyDictionary[ChatTemplate, TemplateTraits] = (
            weakref.WeakKeyDictionary()
        )
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self.byte_level = _is_byte_level(hub)
        self._separates_words = separates_words(hub)
        added = hub.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.added_tokens = {token.content: id for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Loads a folder's tokenizer. Raises ModelError if it is missing or cannot be read."""
        folder = Path(path)
        try:
            text, config = tokenizer_files(folder)
            hub = HubTokenizer.from_str(text)
            if any(map(config.get, ("add_bos_token", "add_eos_token"))):
                set_ends(hub, config)
            tokenizer = cls(hub, config, load_templates(folder, config))
            # A test, because a regular expression may compile and still fail on every text.
            tokenizer.decode(tokenizer.encode(_SAMPLE))
            return tokenizer
        except ModelError:
            raise
        except Exception as error:  # The library raises bare Exceptions.
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        return int(self.hub.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.special_tokens.get("eos_token")
        id = None if eos is None else self.hub.token_to_id(eos)
        return () if id is None else (id,)

    @functools.cached_property
    def longest(self) -> int:
        """Upper bound for the characters of a token."""
        return max(map(len, self.hub.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> Int32:
        """Returns token ids, int32 [n].

        Args:
            text: to tokenize.
            add_special_tokens: whether to add the tokenizer's special tokens, such as BOS.
            most: refuse a text with more tokens, if a part of the text already shows that.

        Raises:
            RequestError: the text is too long, or cannot be tokenized.
        """
        if most is not None and len(text) > most:
            check_length(text, most, self.longest, self.encode)
        pieces = cut_at_gaps(text) if self._separates_words else [text]
        whole = len(pieces) == 1
        try:
            # Unlike `encode`, `encode_batch_fast` releases the GIL.
            special = add_special_tokens and whole
            found = self.hub.encode_batch_fast(pieces, add_special_tokens=special)
        except BaseException as error:  # Lone surrogates, or a panic of the library.
            raise tokenizer_error(error, "the text cannot be tokenized") from error
        ids = [np.asarray(piece.ids, dtype=np.int32) for piece in found]
        if add_special_tokens and not whole:
            begin, end = self._ends
            ids = [begin, *ids, end]
        return ids[0] if whole else np.concatenate(ids)

    @functools.cached_property
    def _ends(self) -> tuple[Int32, Int32]:
        """The special tokens that `encode` adds before and after a text."""
        bare, whole = (self.hub.encode("a", add_special_tokens=add).ids for add in (False, True))
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return int32(whole[:at]), int32(whole[at + len(bare) :])

    def warm_up(self) -> None:
        """Computes cached values before the first request needs them."""
        _ = self.longest

    def decode(self, ids: Sequence[int] | Int32, skip_special_tokens: bool = True) -> str:
        # Unlike `decode`, `decode_batch` releases the GIL.
        try:
            (text,) = self.hub.decode_batch([[int(id) for id in ids]], skip_special_tokens)
        except BaseException as error:
            raise tokenizer_error(error, "the tokens cannot be decoded") from error
        return str(text)

    def piece(self, id: int) -> str | None:
        """Returns a token as the vocabulary writes it, or None for an unknown id."""
        piece = self.hub.id_to_token(id)
        return None if piece is None else str(piece)

    def token_text(self, id: int) -> str:
        """Returns the text of a single token, with U+FFFD for incomplete characters."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = str(self.hub.decode([id], skip_special_tokens=False))
        return text

    def token_bytes(self, id: int) -> bytes:
        """Returns a token's exact bytes for byte-level BPE and byte fallback, else its text in
        UTF-8."""
        if id not in self._bytes:
            self._bytes[id] = self._token_bytes(id)
        return self._bytes[id]

    def _token_bytes(self, id: int) -> bytes:
        piece = self.hub.id_to_token(id)
        if piece is None:
            return b""
        if id in self._added:
            return str(piece).encode()
        if self.byte_level and all(char in BYTE_OF for char in piece):
            return bytes(BYTE_OF[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def template(self, with_tools: bool = False) -> ChatTemplate:
        """Returns the chat template.

        Args:
            with_tools: whether the conversation has tools. The template "tool_use" is then
                preferred.

        Raises:
            RequestError: the model has no chat template.
        """
        names = ("tool_use", "default") if with_tools else ("default",)
        source = next((self.chat_templates[n] for n in names if n in self.chat_templates), None)
        if source is None:
            raise RequestError(
                "the model has no chat template: use completions, or give --chat-template",
                "messages",
            )
        return self._compile(source)

    def traits(self, template: ChatTemplate) -> TemplateTraits:
        """Returns how one of the model's templates handles tools and tool calls."""
        if template not in self._traits:
            self._traits[template] = probe(template, self.special_tokens)
        return self._traits[template]

    def use_template(self, source: str) -> None:
        """Replaces all of the model's chat templates. Raises RequestError if it is not valid."""
        self._compile(source)
        self.chat_templates = {"default": source}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as the model was trained to read it. Raises RequestError."""
        if chat_template is not None:
            template = self._compile(chat_template)
        else:
            template = self.template(with_tools=bool(kwargs.get("tools")))
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, **self.special_tokens, **kwargs
        )

    def _compile(self, source: str) -> ChatTemplate:
        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            template = self._compiled[source] = ChatTemplate(source)
        return template


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the `Tokenizer.eos_token_ids` of a folder, () if there are none.

    If the configuration suffices, no tokenizer is built, because a large vocabulary takes a good
    part of a second.
    """
    if not (folder / "tokenizer.json").exists():
        return ()
    try:
        config = json.loads(read_bounded(folder / "tokenizer_config.json"))
        eos = _content(config.get("eos_token"))
        for id, token in config.get("added_tokens_decoder", {}).items():
            if eos is not None and _content(token) == eos:
                return (int(id),)
    except (OSError, ValueError, AttributeError, RecursionError):
        pass  # The error is reported when the tokenizer is loaded.
    return Tokenizer.from_path(folder).eos_token_ids


def _content(token: Any) -> str | None:
    """Returns a special token's text. In files it is a text, or an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _is_byte_level(hub: HubTokenizer) -> bool:
    if hub.decoder is None:
        return False
    # The state is JSON. The whole tokenizer's would have the vocabulary, too.
    decoder = json.loads(hub.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


# -- refusal of texts with more tokens than a context, by tokenizing as little as possible -----

_CHARS = 6
"""The first part of a long text has this many characters for each allowed token."""
_MARGIN = 1.25
"""A part is refused only beyond this multiple of the limit, because a cut may change tokens."""


def check_length(text: str, most: int, longest: int, encode: Callable[[str], Sized]) -> None:
    """Refuses a text with more than `most` tokens if a part of the text already shows that.

    Args:
        text: the request's text.
        most: limit for its tokens.
        longest: upper bound for the characters of a token.
        encode: returns a text's tokens.

    Raises:
        RequestError: the text has more characters than `most` of the longest tokens, or its first
            part alone exceeds the limit by a quarter.
    """
    if len(text) > most * longest:
        raise _too_long(text, most)
    part = most * _CHARS
    if len(text) > 2 * part and len(encode(text[:part])) > most * _MARGIN:
        raise _too_long(text, most)


def _too_long(text: str, most: int) -> RequestError:
    return RequestError(
        f"The prompt has {len(text)} characters, which are more than this model's maximum context "
        f"length of {most} tokens can hold.",
        "prompt",
        "context_length_exceeded",
    )
