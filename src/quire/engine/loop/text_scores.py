"""`LLM.classify` and `LLM.score`: classes and scores in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from quire.arrays import Float32
from quire.engine.loop.core import EngineCore
from quire.engine.loop.embedding import (
    NO_TOKENS,
    PooledPrompt,
    finish,
    pooling_of,
    run_pooled,
    with_prompt,
)
from quire.engine.loop.prompts import Prompt, prompt_ids, read_prompt
from quire.engine.loop.scoring import (
    check_classifies,
    check_scores,
    class_values,
    pair_value,
    similarities,
)
from quire.errors import RequestError
from quire.outputs import ClassificationRequestOutput, ScoringRequestOutput
from quire.pooling_params import PoolingParams
from quire.text.pairs import encode_pair, encode_texts
from quire.text.tokenizer import Tokenizer

Pairs = Mapping[str, tuple[str, str]]


def classify_all(
    core: EngineCore,
    tokenizer: Tokenizer | None,
    prompts: Mapping[str, Prompt],
    let_interrupt: Callable[[], None],
    done: Callable[[], None],
) -> list[ClassificationRequestOutput]:
    """Returns the classes of each prompt, in order. See `embed_all`."""
    check_classifies(core.config)
    given = [read_prompt(prompt)[1] for prompt in prompts.values()]
    if tokenizer is not None:
        given = encode_texts(tokenizer, given)
    ids = [prompt_ids(prompt, NO_TOKENS, core.config, tokenizer) for prompt in given]
    wanted = {name: PooledPrompt(own, "classes") for name, own in zip(prompts, ids, strict=True)}
    found = {}
    for name, _, raw in run_pooled(core, wanted, let_interrupt):
        values = class_values(raw, core.config)
        label = core.config.labels[int(values.argmax())]
        own = wanted[name].ids.tolist()
        found[name] = ClassificationRequestOutput(name, values.tolist(), label, own)
        done()
    return [found[name] for name in prompts]


def score_all(
    core: EngineCore,
    tokenizer: Tokenizer | None,
    pairs: Pairs,
    let_interrupt: Callable[[], None],
    done: Callable[[], None],
) -> list[ScoringRequestOutput]:
    """Returns the score of each pair, in order. See `embed_all`."""
    check_scores(core.config)
    if tokenizer is None:
        raise RequestError("scores need a tokenizer, which was not loaded", "prompt")
    run = _pair_scores if core.config.task == "classify" else _similarities
    scores, counts = run(core, tokenizer, pairs, let_interrupt, done)
    return [
        ScoringRequestOutput(name, float(score), count)
        for name, score, count in zip(pairs, scores, counts, strict=True)
    ]


def _pair_scores(
    core: EngineCore,
    tokenizer: Tokenizer,
    pairs: Pairs,
    let_interrupt: Callable[[], None],
    done: Callable[[], None],
) -> tuple[Float32, list[int]]:
    """Returns a reranker's scores and the number of tokens of each pair."""
    wanted = {}
    for name, pair in pairs.items():
        ids, second = encode_pair(tokenizer, *pair, longest=core.config.longest_prompt)
        wanted[name] = PooledPrompt(
            prompt_ids(ids, NO_TOKENS, core.config, tokenizer), "classes", second
        )
    found = {}
    for name, _, raw in run_pooled(core, wanted, let_interrupt):
        found[name] = pair_value(raw, core.config)[0]
        done()
    return np.asarray([found[name] for name in pairs]), [len(wanted[n].ids) for n in pairs]


def _similarities(
    core: EngineCore,
    tokenizer: Tokenizer,
    pairs: Pairs,
    let_interrupt: Callable[[], None],
    done: Callable[[], None],
) -> tuple[Float32, list[int]]:
    """Returns the similarities of texts' vectors and the number of tokens of each pair."""
    params = PoolingParams()
    kind = pooling_of(params, core.config)
    texts = dict.fromkeys(text for pair in pairs.values() for text in pair)
    ids = encode_texts(tokenizer, [with_prompt(text, params, core.config) for text in texts])
    checked = [prompt_ids(own, NO_TOKENS, core.config, tokenizer) for own in ids]
    base = next(iter(pairs), "")
    names = {text: f"{base}.{index}" for index, text in enumerate(texts)}
    wanted = {
        name: PooledPrompt(own, kind) for name, own in zip(names.values(), checked, strict=True)
    }
    found = {name: finish(raw, params) for name, _, raw in run_pooled(core, wanted, let_interrupt)}
    vectors = [[found[names[pair[side]]] for pair in pairs.values()] for side in range(2)]
    for _ in pairs:
        done()
    counts = [sum(len(wanted[names[text]].ids) for text in pair) for pair in pairs.values()]
    return similarities(*vectors), counts


def paired(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs of texts; one first text belongs to all second ones.

    Raises:
        RequestError: the numbers of texts do not match, or something is no text.
    """
    left, right = _texts("data_1", first), _texts("data_2", second)
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right) or not left:
        raise RequestError(
            f"{len(left)} and {len(right)} texts: one to all, or as many of each, can be scored",
            "data_1",
        )
    return list(zip(left, right, strict=True))


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """Returns one text or several as a list."""
    if isinstance(given, str):
        return [given]
    texts = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("scores need a text or a list of texts, not token ids", name)
    return texts
