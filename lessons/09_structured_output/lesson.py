"""Makes every text valid: a finite-state machine over bytes, its table of masks, and the engine's.

    python -m lessons 9 [--mine FILE]

1. A machine for one small JSON object, and a table: which token leads from which state to which.
2. Texts under the table's masks: by no model at all, then by your engine.
3. The engine's own masks, made by llguidance from a regular expression or a schema: the same sets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from string import ascii_lowercase, digits

import numpy as np
import torch

from lessons import mine
from lessons.common import Loaded, check, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.features.structured_output.compiler import build_compiler
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.sampling_params import StructuredOutputsParams as Wanted

PIECES: list[mine.Piece] = [(char, 1, 1) for char in '{"name": "'] + [(ascii_lowercase, 1, 8)]
PIECES += [(char, 1, 1) for char in '", "age": '] + [("123456789", 1, 1), (digits, 0, 1)]
PIECES += [("}", 1, 1)]
REGEX = r'\{"name": "[a-z]{1,8}", "age": [1-9][0-9]?\}'
NAME, AGE = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 1, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]}
PROMPT, EXAMPLE = "The child as JSON: ", '{"name": "lily", "age": 7}'
TEXTS = 2


def by_nobody(allowed: torch.Tensor, seed: int) -> list[int]:
    """Returns a random text that the table allows."""
    pick, tokens = mine.Masked(allowed, mine.Sample(seed)), list[int]()
    while not tokens or pick.state:  # the end of a text leads back to state 0
        tokens.append(pick(torch.zeros(allowed.shape[1]), len(tokens)))
    return tokens


def by_model(model: Loaded, allowed: torch.Tensor, stop: int) -> list[list[int]]:
    """Returns texts that the reader's engine writes under the table's masks."""
    own = own_model(model)
    core, prompt = (
        mine.Engine(own, mine.PagedCache(own, 32)),
        model.tokenizer.encode(PROMPT).tolist(),
    )
    requests = [
        mine.Request(str(seed), list(prompt), len(prompt) + 64,
                     mine.Masked(allowed, mine.Sample(seed)), stop)
        for seed in range(TEXTS)
    ]  # fmt: skip
    for request in requests:
        core.add(request)
    core.run()
    return [request.tokens[len(prompt) :] for request in requests]


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
        ours, single = machine[state] != mine.DEAD, theirs.sum() == 1
        same += int(not single and (ours == theirs).all())
        forced += int(single and ours[theirs].all())
        progress.advance([token])
        state = int(machine[state, token])
    compiler.shutdown()
    return same, forced


def main(arguments: Sequence[str] | None = None) -> None:
    model = load(parser(__doc__ or "").parse_args(arguments))
    llm = LLM(str(model.path), max_model_len=256, kv_cache_gb=0.25)
    tokenizer, stop = llm.get_tokenizer(), llm.config.eos_token_ids[0]
    vocabulary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    allowed = mine.token_table(*mine.machine(PIECES), vocabulary, stop)

    def shipped(length: int, wanted: Wanted | None = None) -> list[str]:
        params = SamplingParams(max_tokens=length, structured_outputs=wanted)
        outputs = llm.generate([PROMPT] * TEXTS, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    found = {
        "Quire, no masks": shipped(16),
        "nobody, our masks": [tokenizer.decode(by_nobody(allowed, seed)) for seed in range(50)],
        "mine, our masks": [tokenizer.decode(each) for each in by_model(model, allowed, stop)],
        "Quire, a regex": shipped(64, Wanted(regex=REGEX)),
        "Quire, a schema": shipped(64, Wanted(json=json.dumps(SCHEMA))),
    }
    share = {name: sum(map(valid, texts)) / len(texts) for name, texts in found.items()}
    rows = [[name, len(texts), f"{share[name]:.0%}", texts[0].replace("\n", " ")[:40]]
            for name, texts in found.items()]  # fmt: skip
    print(table(["who writes", "texts", "valid", "the first"], rows))
    for name, each in share.items():
        check(each == (0 if "no masks" in name else 1), f"{name}: {each:.0%} valid")
    (same, forced), states = compare(llm, allowed.numpy()), len(tokenizer.encode(EXAMPLE))
    check(same + forced == states, f"llguidance: the same sets in {same} states of {states}, and")
    check(same > 3, f"one of ours in {forced} where only one text can follow")
    llm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
