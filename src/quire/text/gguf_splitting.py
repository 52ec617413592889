"""Patterns that split text before byte-level BPE, by their names in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer_files import KIMI

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
"""Words that begin or continue with capitals."""
_PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_NO_SENTENCE_SIGNS = " ?[^(\\s|.,!?…。，、।۔،)]+"
_LATIN_GREEK_CYRILLIC = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The way a tokenizer splits text.

    Attributes:
        patterns: regular expressions that are applied one after the other. Text is split at their
            matches, and matches are pieces too.
        whole_first: whether a piece that is a token becomes that token without merges.
        begins: whether texts begin with BOS if the file has no setting for it.
        normalized: whether text is normalized to NFC.
        characters: whether tokens consist of characters instead of bytes, with ▁ for spaces.
    """

    patterns: tuple[str, ...]
    whole_first: bool = False
    begins: bool = False
    normalized: bool = False
    characters: bool = False


def _words(numbers: str, *more: str, begin: str = f"{_ENDINGS}|", signs: str = _SIGNS) -> str:
    return f"{begin}{_WORD}|{numbers}|{signs}|{_SPACES}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_DIGITS = Splitting((r"\p{N}", _GPT2))
_PLAIN = Splitting((_GPT2,))
_O200K = "|".join([*(f"{word}{_ENDINGS}?" for word in _CASED), r"\p{N}{1,3}", _PATH_SIGNS, _SPACES])
_CL100K = Splitting((_LLAMA3,))
_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", _HAN, _DEEPSEEK_WORDS))
_LINES = Splitting((r"[^\n]+|[\n]+",), characters=True)

_NAMES: dict[Splitting, str] = {
    Splitting((_LLAMA3,), whole_first=True, begins=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    Splitting((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_first=True): "minicpm5",
    _CL100K: "dbrx smaug-bpe chatglm-bpe glm4",
    Splitting(
        (
            f"{_ENDINGS}|{_WORD}|\\p{{N}}{{1,3}}|{_SIGNS}|\\s*[\\r\\n]+|"
            + "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ): "jais-2",
    Splitting(
        (
            r"[\r\n]",
            _LATIN_GREEK_CYRILLIC,
            "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")): "deepseek-coder",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    Splitting(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            "|".join([*(f"{w}{_ENDINGS}?" for w in _CASED), r"\p{N}", _PATH_SIGNS, _SPACES]),
        ),
        whole_first=True,
    ): "youtu",
    Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    _DIGITS: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    _PLAIN: (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling"
    ),
    Splitting((_QWEN2,), normalized=True): "qwen2 megrez",
    Splitting((_QWEN2,)): "deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
    Splitting((_words(r"\p{N}", begin=""),)): "ufakzeka",
    Splitting(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        normalized=True,
    ): "qwen35",
    Splitting((_NO_SENTENCE_SIGNS,)): "poro-chat bloom gpt3-finnish",
    Splitting((_NO_SENTENCE_SIGNS, r"\p{N}")): "viking",
    Splitting(
        ("|".join([*_CASED, r"\p{N}", _PATH_SIGNS, _SPACES]),), whole_first=True, begins=True
    ): "tekken",
    Splitting(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ): "chameleon",
    Splitting((_O200K,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Splitting((_O200K,), whole_first=True): "granite-embed-multi-97m",
    Splitting((r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)", _O200K)): "tiny_aya cohere2moe",
    Splitting((KIMI,)): "kimi-k2",
    Splitting((_THREES_FROM_THE_RIGHT,)): "superbpe",
    Splitting(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ): "bailingmoe bailingmoe2 llada-moe",
    Splitting((_words(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    Splitting(
        (
            _THREES_FROM_THE_RIGHT,
            "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
            "\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7afᄀ-ᇿ]+",
            _DEEPSEEK_WORDS,
        )
    ): "afmoe",
    Splitting((r"[^\n]+|[\n]+", _QWEN2)): "laguna",
    Splitting(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "exaone-moe",
    _LINES: "gemma4 granite-embed-multi-311m sarvam-moe",
    Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
}
SPLITTINGS = {name: own for own, names in _NAMES.items() for name in names.split()}
"""All names that llama.cpp knows. The patterns are from the published tokenizers. llama.cpp uses
others, because its regex engine does not support some classes."""
