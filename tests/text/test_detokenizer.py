"""Streamed text equals decoding all tokens, and stop strings are found across any token
boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models

from quire.engine.loop.output import CompletionReader
from quire.models import resolve_model_path
from quire.sampling_params import SamplingParams
from quire.text.detokenizer import Detokenizer, StopMatcher
from quire.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(resolve_model_path(None))


def stream(ids: list[int], skip: bool = True) -> tuple[list[str], str]:
    detokenizer = Detokenizer(TOKENIZER, [1, 2, 3], skip_special_tokens=skip)
    return [detokenizer.step(id) for id in ids], detokenizer.finish()


@given(st.text(max_size=60))
@settings(max_examples=150)
def test_streaming_equals_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text).tolist()
    pieces, rest = stream(ids)
    assert "".join(pieces) + rest == TOKENIZER.decode(ids)


def test_characters_of_many_tokens_come_whole() -> None:
    ids = TOKENIZER.encode("a😀é漢").tolist()
    pieces, rest = stream(ids)
    assert "�" not in "".join(pieces)
    assert rest == ""


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    ids = TOKENIZER.encode("😀").tolist()[:-1]
    pieces, rest = stream(ids)
    assert "".join(pieces) == ""
    assert rest.startswith("�")


def test_invalid_utf8_bytes_are_flushed() -> None:
    byte = TOKENIZER.encode("😀").tolist()[-1]  # a continuation byte, which begins no character
    pieces, _ = stream([byte] * 50)
    assert "".join(pieces).count("�") >= 40


@pytest.mark.parametrize("before", range(6))
def test_skipped_tokens_do_not_cut_a_character(before: int) -> None:
    end = TOKENIZER.eos_token_ids[0]
    pieces, rest = stream([end] * before + TOKENIZER.encode("😀").tolist())
    assert "".join(pieces) + rest == "😀"


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.booleans())
@settings(max_examples=150)
def test_a_whole_completion_reads_as_its_tokens_one_by_one(ids: list[int], skip: bool) -> None:
    pieces, rest = stream(ids, skip)
    one_by_one = "".join(pieces) + rest
    whole = Detokenizer(TOKENIZER, [1, 2, 3], skip_special_tokens=skip).whole(ids)
    if "�" in one_by_one:
        # The number of replacement characters for invalid bytes depends on where decoding gives up.
        one_by_one, whole = (text.replace("�", "") for text in (one_by_one, whole))
    assert whole == one_by_one


def sentencepiece_like() -> Tokenizer:
    """A tokenizer of words, whose decoder drops the space at the beginning of a text, and of
    bytes."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    hub = HubTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    hub.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(hub, {})


@pytest.mark.parametrize("broken", range(9))
def test_words_keep_their_spaces(broken: int) -> None:
    """This holds after the prompt, and after invalid bytes."""
    tokenizer = sentencepiece_like()
    ids = [1] + [3 + 0x80] * broken + [2, 1]
    for prompt in ([1], [2, 2, 1]):
        detokenizer = Detokenizer(tokenizer, prompt)
        text = "".join(map(detokenizer.step, ids)) + detokenizer.finish()
        assert text == " a" + "�" * broken + " b a"
        assert Detokenizer(tokenizer, prompt).whole(ids) == text


def byte_tokens(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("prompt", ["", "a", "😀", "😀😀", "é😀😀", "a漢漢", "😀" * 20])
@pytest.mark.parametrize("answer", ["😀😀", "😀", "é", "漢字"])
def test_a_context_of_bytes_begins_with_a_whole_character(prompt: str, answer: str) -> None:
    """Byte fallback replaces a whole run of bytes in which one is broken."""
    tokenizer = sentencepiece_like()
    before = [1, *byte_tokens(prompt)]
    detokenizer = Detokenizer(tokenizer, before)
    assert "".join(map(detokenizer.step, byte_tokens(answer))) == answer
    assert detokenizer.finish() == ""
    assert Detokenizer(tokenizer, before).whole([*byte_tokens(answer), 2]) == f"{answer} b"


def test_a_prompt_may_be_the_beginning_of_a_character() -> None:
    ids = TOKENIZER.encode("😀").tolist()
    for at in range(1, len(ids)):
        detokenizer = Detokenizer(TOKENIZER, ids[:at])
        assert "".join(map(detokenizer.step, ids[at:])) == "😀"


@given(
    prompt=st.text(max_size=8),
    text=st.text(alphabet="a😀é漢�\n", max_size=8),
    at=st.integers(0, 40),
)
@settings(max_examples=100)
def test_a_prompt_may_end_inside_a_character(prompt: str, text: str, at: int) -> None:
    """The character belongs to the completion, which completes it."""
    tokenizer = sentencepiece_like()
    data = [1, *byte_tokens(prompt + text)]
    size = 1 + len(prompt.encode()) + min(at, len(text.encode()))
    cut = bytes(id - 3 for id in data[1:size]).decode(errors="ignore")
    detokenizer = Detokenizer(tokenizer, data[:size])
    shown = "".join(map(detokenizer.step, data[size:])) + detokenizer.finish()
    assert shown == (prompt + text)[len(cut) :] if size < len(data) else shown == ""


def test_a_prompt_s_broken_bytes_are_not_the_completion_s() -> None:
    tokenizer = sentencepiece_like()
    start = byte_tokens("😀")
    for prompt, want in (
        ([1, *start[:2]], " a"),  # never completed
        ([1, start[1]], " a"),  # no character at all
        ([2, 1, *start[:3], start[0]], " a"),
    ):
        detokenizer = Detokenizer(tokenizer, prompt)
        assert detokenizer.step(1) == want
        assert Detokenizer(tokenizer, prompt).whole([1]) == want
    detokenizer = Detokenizer(tokenizer, [1, start[0]])
    assert detokenizer.step(start[1]) + detokenizer.step(1) == "� a"


def test_broken_bytes_do_not_break_the_character_after_them() -> None:
    tokenizer = sentencepiece_like()
    ids = [*byte_tokens("😀")[:2], *byte_tokens("😀é"), 3 + 0x80, *byte_tokens("é"), 1]
    detokenizer = Detokenizer(tokenizer, [1])
    text = "".join(map(detokenizer.step, ids)) + detokenizer.finish()
    assert text == "��😀é�é a"
    assert Detokenizer(tokenizer, [1]).whole(ids) == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, sentencepiece_like()])
def test_a_replacement_character_that_the_model_wrote_is_text(tokenizer: Tokenizer) -> None:
    text = "a��b�"
    ids = byte_tokens(text) if tokenizer is not TOKENIZER else tokenizer.encode(text).tolist()
    detokenizer, shown = Detokenizer(tokenizer, [1]), []
    for at in range(len(ids)):
        shown.append(detokenizer.step(ids[at]))
        known = b"".join(map(tokenizer.token_bytes, ids[: at + 1]))
        assert "".join(shown) == known.decode(errors="ignore")
    assert "".join(shown) == text


@pytest.mark.parametrize(("text", "cut"), [("ab�", 0), ("ab😀", 1), ("ab😀", 3)])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_end_in_a_replacement_character(
    text: str, cut: int, include: bool
) -> None:
    """The replacement character was written by the model, or stands for a character cut off by the
    completion's end."""
    ids = byte_tokens(text)
    ids = ids[: len(ids) - cut]
    params = SamplingParams(stop=("b�",), include_stop_str_in_output=include)
    reader = CompletionReader(0, [1], params, sentencepiece_like())
    updates = [reader.feed([id]) for id in ids[:-1]]
    updates.append(reader.feed(ids[-1:], (), "length"))
    assert "".join(update.text for update in updates) == ("ab�" if include else "a")
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "b�")


def test_special_tokens() -> None:
    end = TOKENIZER.eos_token_ids[0]
    ids = [*TOKENIZER.encode("Hi").tolist(), end]
    assert "".join(stream(ids)[0]) == "Hi"
    assert "".join(stream(ids, skip=False)[0]) == "Hi<|im_end|>"


@given(st.text(max_size=30), st.integers(0, 3))
@settings(max_examples=50)
def test_some_special_tokens_may_be_kept(text: str, at: int) -> None:
    kept, skipped = (TOKENIZER.hub.token_to_id(t) for t in ("<|im_start|>", "<|endoftext|>"))
    ids = [*TOKENIZER.encode(text).tolist(), skipped, kept]
    ids = [*ids[:at], skipped, *ids[at:]]
    want = TOKENIZER.decode([id for id in ids if id != skipped], skip_special_tokens=False)
    one_by_one = Detokenizer(TOKENIZER, [1, 2, 3], keep=frozenset({kept}))
    assert "".join(map(one_by_one.step, ids)) + one_by_one.finish() == want
    assert Detokenizer(TOKENIZER, [1, 2, 3], keep=frozenset({kept})).whole(ids) == want


@given(
    text=st.text(alphabet="abc", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 3), min_size=20, max_size=20),
    include=st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_do_not_depend_on_cuts(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """With one character at a time, the first complete stop string ends the text."""
    matcher, shown, hit = StopMatcher(stops, include=include), "", None
    for char in text:
        part, hit = matcher.feed(char)
        shown += part
        if hit is not None:
            break
    else:
        shown += matcher.finish()
    ends = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at)
    ]
    if not ends:
        assert (shown, hit) == (text, None)
        return
    end = min(ends)[0]
    assert hit is not None
    assert shown == text[: end if include else end - len(hit)]
    # However the text is cut, no more is ever shown than up to the stop string.
    matcher, again, at = StopMatcher(stops, include=include), "", 0
    for size in cuts:
        part, found = matcher.feed(text[at : at + size])
        again += part
        at += size
        if found is not None:
            break
    assert text.startswith(again)
    assert len(again) <= end


def test_only_a_possible_stop_is_held_back() -> None:
    matcher = StopMatcher(["<end>"], include=False)
    assert matcher.feed("hello <e") == ("hello ", None)
    assert matcher.feed("lse>") == ("<else>", None)
    assert matcher.feed("<end") == ("", None)
    assert matcher.feed("> more") == ("", "<end>")


def test_a_stop_string_counts_by_where_it_ends() -> None:
    matcher = StopMatcher(["<end>"], include=False)
    assert matcher.feed("<end> <e", early=True) == ("<end> ", None)
    assert matcher.feed("nd>") == ("", "<end>")


@pytest.mark.parametrize("include", [False, True])
def test_reader_ends_at_a_stop_string_in_mid_batch(include: bool) -> None:
    ids = TOKENIZER.encode("One two STOP three").tolist()
    params = SamplingParams(stop=("STOP",), include_stop_str_in_output=include)
    reader = CompletionReader(0, [1], params, TOKENIZER)
    update = reader.feed(ids)
    assert update.text == ("One two STOP" if include else "One two ")
    assert (update.finish_reason, update.stop_reason) == ("stop", "STOP")
    assert len(update.token_ids) < len(ids)
    assert reader.ended_by_text


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = TOKENIZER.encode("a b a b").tolist()
    params = SamplingParams(stop=("b",), min_tokens=3, max_tokens=9)
    text = CompletionReader(0, [1], params, TOKENIZER).feed(ids).text
    assert text == "a b a "


def test_a_stop_token_is_no_text() -> None:
    token = TOKENIZER.encode(" the").tolist()[0]
    params = SamplingParams(stop_token_ids=(token,))
    update = CompletionReader(0, [1], params, TOKENIZER).feed([token], (), "stop", token)
    assert (update.text, update.token_ids, update.stop_reason) == ("", [token], token)
