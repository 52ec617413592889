"""Read the public text and chat collections and split them into training and held-out parts.

The data folder holds `corpora/` and `chat/` (names below), each file plain or xz-compressed.
Two rules are kept here, in one place: nothing from a `*_valid*` file is ever trained on, and a
training document that also occurs in a valid file is dropped.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from pathlib import Path

Message = dict[str, str]
Conversation = list[Message]

HELD_OUT_EVERY = 40  # one chat line in 40 is kept for evaluation, chosen by position
PERSON_SYSTEM_PROMPTS = (
    "You are a person making small talk.",
    "Chat like a friendly person.",
    "You are a human chatting with a stranger.",
)
# Lines of the two question-and-answer sets that would teach a different identity or code.
_UNWANTED = re.compile(
    r"```|\b(a\.?l\.?i\.?c\.?e|bot|robot|robots|computer program|artificial|emotion\w*|clone|hal|"
    r"sentient|conscious|human|humans|eliza|siri|alexa|chatterbot|stock market|gossip)\b",
    re.IGNORECASE,
)


def read_text(path: Path) -> str:
    """The text of `path`, or of `path` + `.xz` where only that exists."""
    packed = path.with_name(path.name + ".xz")
    if path.exists():
        return path.read_text(encoding="utf-8")
    return lzma.open(packed, "rt", encoding="utf-8").read()


def read_documents(path: Path) -> list[str]:
    """Documents of a corpus file, split at its `<|endoftext|>` lines."""
    parts = (part.strip() for part in read_text(path).split("<|endoftext|>"))
    return [part for part in parts if part]


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of a chat file, one JSON object a line."""
    return [json.loads(line)["messages"] for line in read_text(path).splitlines() if line.strip()]


def split(rows: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) rows; a held-out question never occurs in the training part."""
    held = rows[::HELD_OUT_EVERY]
    asked = {row[0]["content"].strip().lower() for row in held}
    return [row for row in rows if row[0]["content"].strip().lower() not in asked], held


def stories(data: Path) -> tuple[list[str], list[str]]:
    """(training, valid) stories; the few training stories that also are valid ones are dropped."""
    valid = read_documents(data / "corpora/tinystories_valid.txt")
    known = {text[:150] for text in valid}
    train = read_documents(data / "corpora/tinystories_train.txt")
    return [text for text in train if text[:150] not in known], valid


def story_requests(data: Path) -> list[Conversation]:
    """Returns requests with their stories, without stories of the validation set."""
    known = {text[:150] for text in read_documents(data / "corpora/tinystories_valid.txt")}
    rows = read_conversations(data / "chat/tinystories_instruct_train.jsonl")
    return [row for row in rows if row[-1]["content"].strip()[:150] not in known]


def small_talk(data: Path, replies: Path) -> list[Conversation]:
    """The chitchat questions, with this project's own replies in place of the 90 stock ones.

    `replies` maps a stock reply to a list of replies; an empty list drops the question.
    """
    table = {}
    for line in replies.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        table[entry["stock"]] = entry["say"]
    rows = []
    for i, row in enumerate(read_conversations(data / "chat/chitchat_friendly.jsonl")):
        question, stock = row[0]["content"], row[1]["content"]
        options = table.get(stock, [stock])
        if not options or question.startswith("editorial ="):
            continue
        rows.append(turns(question, options[i % len(options)]))
    return rows


def questions(data: Path) -> list[Conversation]:
    """Short instructions and trivia; code, other bots' identities and repeats are dropped."""
    seen: set[str] = set()
    rows = []
    for name in ("rasbt_instruction", "chatterbot_english"):
        for row in read_conversations(data / f"chat/{name}.jsonl"):
            text = " ".join(m["content"] for m in row)
            trivia = name == "rasbt_instruction" or row[0]["content"].rstrip().endswith((".", "?"))
            if len(row) != 2 or _UNWANTED.search(text) or not trivia or text in seen:
                continue
            seen.add(text)
            rows.append(row)
    return rows


def dialogues(data: Path, max_turns: int = 12, seed: int = 0) -> list[Conversation]:
    """People talking, cut to windows of at most `max_turns`, under a system prompt that says so.

    The speakers tell of jobs, pets and families; the system prompt keeps that apart from how the
    model speaks of itself.
    """
    rng = random.Random(seed)
    rows = []
    for name in ("synthetic_persona_chat_valid_test", "topical_chat_valid_test"):
        for row in read_conversations(data / f"chat/{name}.jsonl"):
            if any("[" in m["content"] or "(name)" in m["content"] for m in row):
                continue
            for start in range(0, len(row) - 1, max_turns):
                window = [m for m in row[start : start + max_turns] if m["content"].strip()]
                if len(window) < 2 or window[0]["role"] != "user":
                    continue
                system = {"role": "system", "content": rng.choice(PERSON_SYSTEM_PROMPTS)}
                rows.append([system, *window])
    return rows


def turns(*contents: str) -> Conversation:
    """A conversation whose turns alternate, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
