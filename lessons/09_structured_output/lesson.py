"""Makes every text valid: a finite-state machine over bytes, its table of masks, and the engine's.

    python -m lessons.09_structured_output.lesson

1. A machine for one small JSON object, and a table: which token leads from which state to which.
2. Texts under the table's masks: by no model at all, then by one, an engine call for each token.
3. The engine's own masks, made by llguidance from a regular expression or a schema: the same sets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from random import Random
from string import ascii_lowercase, digits

import numpy as np

from lessons.common import check, load, parser, table
from quire import LLM, SamplingParams
from quire.features.structured_output.compiler import build_compiler
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.sampling_params import StructuredOutputsParams as Wanted

Pieces = list[tuple[str, int, int]]
PIECES: Pieces = [(char, 1, 1) for char in '{"name": "'] + [(ascii_lowercase, 1, 8)]
PIECES += [(char, 1, 1) for char in '", "age": '] + [("123456789", 1, 1), (digits, 0, 1)]
PIECES += [("}", 1, 1)]
REGEX = r'\{"name": "[a-z]{1,8}", "age": [1-9][0-9]?\}'
NAME, AGE = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 1, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]}
PROMPT, EXAMPLE = "The child as JSON: ", '{"name": "lily", "age": 7}'
DEAD, TEXTS = -1, 2
Choose = Callable[..., list[int]]


def build(pieces: Pieces) -> tuple[np.ndarray, list[int]]:
    """Builds a machine that reads, of each piece's characters, at least and at most so many.
    Returns the next state by state and byte, int [states, 256], and states where a text may end."""
    steps: list[list[int]] = [[DEAD] * 256]
    begins = [0]
    for alphabet, least, most in pieces:
        ends = list(begins) if least == 0 else []
        for count in range(1, most + 1):
            steps.append([DEAD] * 256)
            for before in begins:
                for byte in alphabet.encode():
                    steps[before][byte] = len(steps) - 1
            begins = [len(steps) - 1]
            ends += begins if count >= least else []
        begins = ends
    return np.array(steps), begins


def walk(llm: LLM, steps: np.ndarray, ends: list[int]) -> np.ndarray:
    """Returns the next state by state and token, int [states, vocab]: one walk for each token,
    from all states at once. Ends lead to state 0."""
    tokenizer = llm.get_tokenizer()
    padded = np.vstack([steps, np.full(256, DEAD)])  # DEAD, the last row, leads nowhere
    found = np.full((len(steps), tokenizer.vocab_size), DEAD)
    for token in range(tokenizer.vocab_size):
        states, text = np.arange(len(steps)), tokenizer.token_bytes(token)
        for byte in text:
            states = padded[states, byte]
        found[:, token] = states if text else DEAD
    found[:, list(llm.config.eos_token_ids)] = np.where(
        np.isin(np.arange(len(steps)), ends), 0, DEAD
    )[:, None]
    return found


def write(llm: LLM, machine: np.ndarray, count: int, choose: Choose) -> list[str]:
    """Writes texts, a token of each at a time, until all have ended. choose: picks the next tokens
    of some texts out of those that each may have."""
    texts: list[list[int]] = [[] for _ in range(count)]
    states, eos = [0] * count, llm.config.eos_token_ids
    while running := [i for i, text in enumerate(texts) if not text or text[-1] not in eos]:
        allowed = [np.flatnonzero(machine[states[i]] != DEAD).tolist() for i in running]
        for i, token in zip(running, choose([texts[i] for i in running], allowed), strict=True):
            texts[i].append(token)
            states[i] = int(machine[states[i], token])
    return [llm.get_tokenizer().decode(text) for text in texts]


def valid(text: str) -> bool:
    """Says whether a text is an object of the schema."""
    try:
        name, age = json.loads(text).values()
        return len(name) <= 8 and type(age) is int and 1 <= age <= 99
    except (ValueError, TypeError, AttributeError):
        return False


def compare(llm: LLM, machine: np.ndarray) -> tuple[int, int]:
    """Compares the table with llguidance, as the engine calls it, along a text. Returns how often
    both allow the same of several tokens, and how often llguidance allows one of ours alone."""
    compiler, vocab = build_compiler(llm.config), machine.shape[1]
    matcher = compiler.compile(Wanted(regex=REGEX)).result().deep_copy()
    progress, state, same, forced = GrammarState(0, matcher), 0, 0, 0
    for token in llm.get_tokenizer().encode(EXAMPLE).tolist():
        mask = np.zeros((1, -(-vocab // 32)), dtype=np.int32)
        MaskBuilder(vocab).build([MaskRow(progress)], mask, compiler.tokenizer_vocab)
        theirs = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab] == 1
        ours, single = machine[state] != DEAD, theirs.sum() == 1
        same += int(not single and (ours == theirs).all())
        forced += int(single and ours[theirs].all())
        progress.advance([token])
        state = int(machine[state, token])
    compiler.shutdown()
    return same, forced


def main(arguments: Sequence[str] | None = None) -> None:
    model = load(parser(__doc__ or "").parse_args(arguments)).path
    pick, llm = Random(0).choice, LLM(str(model), max_model_len=256, kv_cache_gb=0.25)
    machine = walk(llm, *build(PIECES))
    prompt = llm.get_tokenizer().encode(PROMPT).tolist()

    def by_model(texts: list[list[int]], allowed: list[list[int]]) -> list[int]:
        one = [SamplingParams(max_tokens=1, allowed_token_ids=tuple(each)) for each in allowed]
        outputs = llm.generate([prompt + text for text in texts], one, use_tqdm=False)
        return [output.outputs[0].token_ids[0] for output in outputs]

    def engine(length: int, wanted: Wanted | None = None) -> list[str]:
        params = SamplingParams(max_tokens=length, structured_outputs=wanted)
        outputs = llm.generate([PROMPT] * TEXTS, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    rows = []
    for name, texts in (
        ("the model, no masks", engine(16)),
        ("no model, our masks", write(llm, machine, 50, lambda _, any: [*map(pick, any)])),
        ("the model, our masks", write(llm, machine, TEXTS, by_model)),
        ("the model, a regex", engine(64, Wanted(regex=REGEX))),
        ("the model, a schema", engine(64, Wanted(json=json.dumps(SCHEMA)))),
    ):
        share = sum(map(valid, texts)) / len(texts)
        rows.append([name, len(texts), f"{share:.0%}", texts[0].replace("\n", " ")[:40]])
        check(share == (0 if "no masks" in name else 1), f"{name}: {share:.0%} valid")
    (same, forced), states = compare(llm, machine), len(llm.get_tokenizer().encode(EXAMPLE))
    check(same + forced == states, f"llguidance: the same sets in {same} states of {states}, and")
    check(same > 3, f"one of ours in {forced} where only one text can follow")
    llm.shutdown()
    print(table(["who writes", "texts", "valid", "the first"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
