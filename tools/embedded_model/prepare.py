"""Turn the data folder into a tokenizer and token arrays.

The work folder gets `tokenizer/`, `text.npz` and `books.npz` (plain text), `chat.npz` (the last
phase), and `held_out.json` (the prompts that agreement is measured on). A `.npz` holds `tokens`
uint16, `starts` int64 (one more than there are documents) and `learn` uint8, which says for each
token whether its prediction counts in the loss of the chat phase.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import corpus
import numpy as np
import own_chat
import own_dialogues
import own_stories
from chat_score import read_prompts
from corpus import Conversation
from tokenizer_training import END_OF_TEXT, TURN_END, TURN_START, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

HERE = Path(__file__).parent
CONTEXT = 2048


class Store:
    """Documents as one token array."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END_OF_TEXT)
        self.tokens: list[np.ndarray] = []
        self.learn: list[np.ndarray] = []

    def _add(self, tokens: list[int], learn: list[int]) -> None:
        self.tokens.append(np.array(tokens, dtype=np.uint16))
        self.learn.append(np.array(learn, dtype=np.uint8))

    def add_texts(self, texts: list[str], repeats: int = 1) -> None:
        encoded = [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        for _ in range(repeats):
            for ids in encoded:
                self._add([*ids, self.end], [1] * (len(ids) + 1))

    def add_chats(self, rows: list[Conversation], repeats: int = 1) -> None:
        """ChatML; `learn` marks the assistant's words and its end of turn."""
        pieces = [self._render(row) for row in rows]
        flat = [text for row in pieces for text, _ in row]
        encoded = iter(self.tokenizer.encode_batch(flat, add_special_tokens=False))
        documents = []
        for row in pieces:
            tokens: list[int] = []
            learn: list[int] = []
            for _, counts in row:
                ids = next(encoded).ids
                tokens += ids
                learn += [counts] * len(ids)
            if len(tokens) < CONTEXT:
                documents.append((tokens, learn))
        for _ in range(repeats):
            for tokens, learn in documents:
                self._add([*tokens, self.end], [*learn, 0])

    @staticmethod
    def _render(row: Conversation) -> list[tuple[str, int]]:
        parts = []
        for message in row:
            counts = int(message["role"] == "assistant")
            parts.append((f"{TURN_START}{message['role']}\n", 0))
            parts.append((message["content"].strip() + TURN_END, counts))
            parts.append(("\n", 0))
        return parts

    def save(self, path: Path) -> None:
        lengths = np.array([len(t) for t in self.tokens])
        np.savez(
            path,
            tokens=np.concatenate(self.tokens),
            learn=np.concatenate(self.learn),
            starts=np.concatenate([[0], np.cumsum(lengths)]),
        )
        print(f"{path.name}: {len(lengths):,} documents, {lengths.sum():,} tokens", flush=True)


def held_out_prompts(
    data: Path, talk: dict[str, list[Conversation]], requests: list[Conversation]
) -> list[Conversation]:
    """200 first prompts, 70 for stories and 130 for talk; training drops every line that asks one.

    Story prompts come from the valid file and are such as no training `requests` word the same.
    """
    rng = random.Random(1)
    known = {plain(row[0]["content"]) for row in requests}
    asked = corpus.read_conversations(data / "chat/tinystories_instruct_valid.jsonl")
    asked = [row for row in asked if plain(row[0]["content"]) not in known]
    chosen = rng.sample(asked, min(70, len(asked)))
    rest = talk["own"] + rng.sample(talk["small_talk"], 60) + talk["questions"]
    chosen += rest[: 200 - len(chosen)]
    return [row[:1] for row in chosen]


def plain(text: str) -> str:
    """Letters and digits of a question in lower case, to compare questions by."""
    return "".join(c for c in text.lower() if c.isalnum())


def without(rows: list[Conversation], questions: set[str]) -> list[Conversation]:
    """The rows that ask none of `questions` (as `plain` gives them)."""
    return [
        row
        for row in rows
        if not any(m["role"] == "user" and plain(m["content"]) in questions for m in row)
    ]


@dataclass
class Sources:
    """Texts and conversations to train on, without the lines that are asked in tests."""

    stories: list[str]
    valid: list[str]
    storybooks: list[str]
    books: list[str]
    requests: list[Conversation]
    talk: list[Conversation]
    questions: list[Conversation]
    people: list[Conversation]
    facts: list[Conversation]
    own: list[tuple[str, Conversation]]
    told: list[Conversation]
    joined: list[Conversation]
    single: list[Conversation]
    held_out: list[Conversation]
    closed: set[str]


def read_sources(data: Path) -> Sources:
    """Reads the data folder, and draws what is made of it."""
    rng = random.Random(0)
    stories, valid = corpus.stories(data)
    books = corpus.read_documents(data / "corpora/gutenberg_simple.txt")
    storybooks = corpus.read_documents(data / "corpora/storybooks_en.txt")
    requests, _ = corpus.split(corpus.story_requests(data))
    talk, talk_held = corpus.split(
        corpus.small_talk(data, HERE / "own_data/chitchat_replies.jsonl")
    )
    questions, questions_held = corpus.split(corpus.questions(data))
    people = corpus.dialogues(data)
    own, own_held = own_chat.intents(HERE / "own_data/intents.jsonl")
    held = {"own": own_held, "small_talk": talk_held, "questions": questions_held}
    prompts = held_out_prompts(data, held, requests)
    closed = {plain(row[0]["content"]) for row in prompts}
    closed |= {plain(text) for rules in read_prompts() for text in rules["ask"]}
    requests, talk, questions, people, facts = (
        without(rows, closed) for rows in (requests, talk, questions, people, own_chat.facts())
    )
    own = [(kind, row) for kind, row in own if without([row], closed)]
    told = without(own_chat.topic_stories(stories, rng), closed)
    joined = own_chat.conversations([*own, *(("fact", f) for f in facts)], told, 6000, rng)
    single = [
        [{**ask, "content": own_chat.reword(ask["content"], rng)}, say]
        for _, (ask, say) in own
        for _ in range(6)
    ]
    single, joined = without(single, closed), without(joined, closed)
    return Sources(
        stories, valid, storybooks, books, requests, talk, questions, people, facts, own, told,
        joined, single, prompts, closed,
    )  # fmt: skip


def prepare(data: Path, work: Path) -> None:
    """Writes everything that training reads."""
    work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    found = read_sources(data)
    (work / "held_out.json").write_text(json.dumps(found.held_out))
    talk, questions, people, facts = found.talk, found.questions, found.people, found.facts
    sample = [text[:40_000] for text in found.books] + found.stories + found.storybooks
    sample += [m["content"] for row in people + talk + questions for m in row]
    tokenizer = train_tokenizer(sample)
    save_tokenizer(tokenizer, work / "tokenizer", CONTEXT)

    text = Store(tokenizer)
    text.add_texts(found.stories, 4)
    text.add_texts(found.storybooks, 4)
    text.add_chats(found.requests + people + talk + questions + facts + found.single)
    text.save(work / "text.npz")
    long = Store(tokenizer)
    long.add_texts(found.books)
    long.save(work / "books.npz")
    chat = Store(tokenizer)
    system = own_chat.with_system
    short = [(talk, 3), (questions, 4), (facts, 3), (found.single, 3), (found.joined, 1)]
    for rows, repeats in [*short, (found.told, 1), (found.requests, 1)]:
        for _ in range(repeats):
            chat.add_chats([system(row, rng) for row in rows])
    chat.add_chats(people[::2])
    chat.save(work / "chat.npz")
    check = Store(tokenizer)
    check.add_texts(found.valid)
    check.save(work / "valid.npz")


def prepare_dialogues(data: Path, work: Path, tokenizer: Tokenizer) -> None:
    """Writes the conversations of the last stage, and the plain text beside them.

    `dialogues.npz` has what `own_dialogues` and `own_stories` draw, beside the conversations of the
    stage before; `plain.npz` the stories, the storybooks and a part of the books.
    """
    rng = random.Random(3)
    found = read_sources(data)
    (work / "held_out.json").write_text(json.dumps(found.held_out))
    drawn = without(own_dialogues.draw(90_000, rng), found.closed)
    told = without(own_stories.about(found.stories, 20_000, rng), found.closed)
    parts = [(drawn, 1), (told, 1), (found.talk, 1), (found.questions, 2), (found.facts, 2)]
    parts += [(found.single, 2), (found.joined, 1), (rng.sample(found.requests, 4000), 1)]
    chat = Store(tokenizer)
    for rows, repeats in parts:
        for _ in range(repeats):
            chat.add_chats([own_chat.with_system(row, rng, 0.1) for row in rows])
    chat.add_chats(found.people[::6])
    chat.save(work / "dialogues.npz")
    text = Store(tokenizer)
    text.add_texts(found.stories + found.storybooks)
    text.add_texts([book[:60_000] for book in found.books])
    text.save(work / "plain.npz")
    check = Store(tokenizer)
    check.add_texts(found.valid)
    check.save(work / "valid.npz")
