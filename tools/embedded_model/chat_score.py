"""Asks a model forty fixed prompts, and judges its answers by fixed rules.

    python tools/embedded_model/chat_score.py MODEL_DIR [--device cuda] [--show]

`own_data/prompts.jsonl` has one conversation a line: the user's messages, and rules for the last
answer. The model itself gives every answer. All rules must hold:

has, lacks: patterns that are found, or not, in any case of letters.
count: words, alone or in the plural, and how often they occur at least.
members: a kind of thing, and how many different ones are named at least; nothing else is listed.

Every answer must also end by itself. No training line asks any of these questions in the same
words (see `prepare.py`). Answers are greedy unless a temperature is given.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from categories import members, plural
from model import Qwen3, Shape, load
from sampling import generate
from tokenizers import Tokenizer

PROMPTS = Path(__file__).parent / "own_data/prompts.jsonl"
LIMIT = 320
Rules = dict[str, Any]


def read_prompts() -> list[Rules]:
    """Returns the forty prompts, in order."""
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def passes(rules: Rules, answer: str) -> bool:
    """Whether an answer keeps the rules."""
    found = [re.search(p, answer, re.IGNORECASE) for p in rules.get("has", ())]
    wrong = [re.search(p, answer, re.IGNORECASE) for p in rules.get("lacks", ())]
    if not all(found) or any(wrong):
        return False
    for word, least in rules.get("count", {}).items():
        if len(re.findall(rf"\b({word}|{plural(word)})\b", answer, re.IGNORECASE)) < least:
            return False
    return all(lists(answer, kind, count) for kind, count in rules.get("members", {}).items())


def lists(answer: str, kind: str, count: int) -> bool:
    """Whether an answer names so many different things of a kind, and no other in its list."""
    names = {form: noun for noun in members(kind) for form in (noun.lower(), plural(noun).lower())}
    # What is between commas and "and", without articles, in the list's sentence.
    parts = re.split(r",|\band\b|:", answer.lower().split(".")[0])
    listed = [re.sub(r"^(an?|the) ", "", part.strip(" .!?\n")) for part in parts]
    known = [names[part] for part in listed if part in names]
    # The first part may begin with words of a sentence: "I know apples".
    first = listed[0].split()[-1:] or [""]
    if listed[0] not in names and first[0] in names:
        known.append(names[first[0]])
    others = [part for part in listed[1:] if part not in names]
    return len(set(known)) >= count and len(known) == len(set(known)) and not others


def ask_all(
    model: Qwen3, tokenizer: Tokenizer, prompts: list[Rules], temperature: float = 0.0
) -> list[list[tuple[str, bool]]]:
    """Returns each conversation's answers, and whether they ended by themselves."""
    stop, pad = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    texts = ["" for _ in prompts]
    answers: list[list[tuple[str, bool]]] = [[] for _ in prompts]
    for turn in range(max(len(p["ask"]) for p in prompts)):
        open_ = [i for i, p in enumerate(prompts) if turn < len(p["ask"])]
        for i in open_:
            asked = prompts[i]["ask"][turn]
            texts[i] += f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        encoded = [tokenizer.encode(texts[i], add_special_tokens=False).ids for i in open_]
        for i, ids in zip(
            open_, generate(model, encoded, LIMIT, temperature, stop, pad), strict=True
        ):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answers[i].append((text, ids[-1] == stop))
            texts[i] += f"{text}<|im_end|>\n"
    return answers


def score(
    model: Qwen3, tokenizer: Tokenizer, temperature: float = 0.0
) -> list[tuple[Rules, list[str], bool]]:
    """Returns each prompt, the answers, and whether the last one passes."""
    prompts = read_prompts()
    answers = ask_all(model, tokenizer, prompts, temperature)
    return [
        (rules, [text for text, _ in given], given[-1][1] and passes(rules, given[-1][0]))
        for rules, given in zip(prompts, answers, strict=True)
    ]


def shape_of(folder: Path) -> Shape:
    """Returns the shape that a config.json describes."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", action="store_true", help="print the answers")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = load(args.model, shape_of(args.model)).to(args.device).eval()
    found = score(model, Tokenizer.from_file(str(args.model / "tokenizer.json")), args.temperature)
    for rules, answers, passed in found:
        print("pass" if passed else "FAIL", " / ".join(rules["ask"]))
        if args.show:
            print("".join(f"     > {text}\n" for text in answers))
    count = sum(passed for *_, passed in found)
    print(f"{count} of {len(found)} pass")


if __name__ == "__main__":
    main()
