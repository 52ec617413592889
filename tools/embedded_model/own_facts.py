"""Simple facts, each as a question, a clause and an answer, and the words that dialogues draw."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from categories import CATEGORIES, members
from own_chat import CAPITALS, NUMBERS, OPPOSITES, SOUNDS, article, pairs

DATA = json.loads((Path(__file__).parent / "own_data/wordings.json").read_text(encoding="utf-8"))
GIRLS, BOYS, PETS, CITIES, WORDS = (
    DATA["names"][key].split() for key in ("girls", "boys", "pets", "cities", "words")
)
HUES, OBJECTS, RELATIVES = DATA["hues"], DATA["objects"], DATA["relatives"]
ANIMALS_AT_HOME, DIRECT, CLAUSES = DATA["animals_at_home"], DATA["direct"], DATA["clauses"]
JOBS = members("job")
BARE = (
    "color",
    "season",
    "day",
    "month",
    "country",
    "city",
    "sport",
    "drink",
    "planet",
    "food",
    "clothing",
)
LISTED = [kind for kind in CATEGORIES if kind not in ("body part", "food", "drink", "clothing")]


@dataclass(frozen=True)
class Fact:
    """A question, the same as a clause ("what a cow says"), and the answer."""

    question: str
    clause: str
    answer: str


def asked(fact: Fact, rng: random.Random) -> str:
    """Returns one way to ask for a fact."""
    if rng.random() < 0.5:
        return rng.choice(CLAUSES).format(c=fact.clause)
    text = rng.choice(DIRECT)
    question = fact.question
    if not text.startswith("{q}") and rng.random() < 0.5:
        question = question[0].lower() + question[1:] if question[:2] != "I " else question
    return text.format(q=question)


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


# -- facts -------------------------------------------------------------------------------------


def number(word: str, rng: random.Random) -> str:
    """Returns a number word, sometimes in figures."""
    if word in NUMBERS and rng.random() < 0.3:
        return str(NUMBERS.index(word))
    return word


def _things(rng: random.Random) -> Fact:
    kind = rng.randrange(9)
    if kind == 0:
        animal, legs = rng.choice(pairs(DATA["tables"]["legs"]))
        one = article(animal)
        return Fact(
            rng.choice([
                f"How many legs does {one} have?", f"{one} has how many legs?",
                f"How many legs has {one} got?",
            ]),
            f"how many legs {one} has",
            f"{sentence(one)} has {legs} legs.",
        )  # fmt: skip
    if kind == 1:
        thing, color = rng.choice(pairs(DATA["tables"]["colors"]))
        return Fact(
            rng.choice([
                f"What color is {thing}?", f"Which color does {thing} have?",
                f"What is the color of {thing}?",
            ]),
            f"what color {thing} is",
            f"{sentence(thing)} is {color}.",
        )  # fmt: skip
    if kind == 2:
        old, young = rng.choice(pairs(DATA["tables"]["young"]))
        return Fact(
            rng.choice([f"What is a baby {old} called?", f"What do you call a young {old}?"]),
            f"what a baby {old} is called",
            f"A baby {old} is called {article(young)}.",
        )
    if kind == 3:
        who, what = rng.choice(pairs(DATA["tables"]["makes"]))
        one = article(who)
        return Fact(f"What does {one} make?", f"what {one} makes", f"{sentence(one)} makes {what}.")
    if kind == 4:
        what, use = rng.choice(pairs(DATA["tables"]["uses"]))
        verb = "are" if what == "scissors" else "is"
        return Fact(
            rng.choice([f"What {verb} {what} for?", f"What do you do with {what}?"]),
            f"what {what} {verb} for",
            f"You use {what} {use}.",
        )
    if kind == 5:
        big, small = rng.choice(pairs(DATA["tables"]["bigger"]))
        first, second = rng.sample([big, small], 2)
        if rng.random() < 0.5:
            question, answer = "bigger", big
        else:
            question, answer = "smaller", small
        return Fact(
            f"What is {question}, {first} or {second}?",
            f"what is {question}, {first} or {second}",
            f"{sentence(answer)} is {question}.",
        )
    if kind == 6:
        what, count = rng.choice(pairs(DATA["tables"]["counts"]))
        verb, _, rest = what.partition(" ")
        if rest.startswith("does"):
            _, article_, noun, _ = rest.split(" ", 3)
            one = f"{article_} {noun}"
            return Fact(
                f"How many {what}?", f"how many {verb} {one} has",
                f"{sentence(one)} has {count} {verb}.",
            )  # fmt: skip
        if rest.startswith("go"):
            said = f"{sentence(count)} planets go around the sun."
            return Fact(f"How many {what}?", f"how many {what}", said)
        where = rest.removeprefix("are ")
        return Fact(
            rng.choice([f"How many {what}?", f"How many {verb} are there {where}?"]),
            rng.choice([f"how many {what}", f"how many {verb} there are {where}"]),
            f"There are {count} {verb} {where}.",
        )
    if kind == 7:
        animal, home = rng.choice(pairs(DATA["tables"]["homes"]))
        where = {"water": "in water", "trees": "in trees"}.get(home, f"in {article(home)}")
        if home in ("cold south", "desert", "grassland"):
            where = f"in the {home}"
        one = article(animal)
        return Fact(
            f"Where does {one} live?", f"where {one} lives", f"{sentence(one)} lives {where}."
        )
    animal, sound = rng.choice(pairs(SOUNDS))
    one = article(animal)
    return Fact(
        rng.choice([
            f"What does {one} say?", f"Which sound does {one} make?",
            f"What noise does {one} make?",
            f"How does {one} go?", f"What sound do you hear from {one}?",
        ]),
        rng.choice([f"what {one} says", f"which noise {one} makes", f"what sound {one} makes"]),
        f"{sentence(one)} says {sound}.",
    )  # fmt: skip


def _capital(rng: random.Random) -> Fact:
    country, city = rng.choice(pairs(CAPITALS))
    city = city.removesuffix(".")
    ways = [
        f"What is the capital of {country}?", f"Which city is the capital of {country}?",
        f"What is {country}'s capital?", f"The capital of {country} is which city?",
        f"{sentence(country)} has which capital?", f"What is the capital city of {country}?",
        f"What is the name of the capital of {country}?",
    ]  # fmt: skip
    clauses = [
        f"what the capital of {country} is",
        f"the capital of {country}",
        f"which city is the capital of {country}",
    ]
    return Fact(rng.choice(ways), rng.choice(clauses), f"The capital of {country} is {city}.")


def _opposite(rng: random.Random) -> Fact:
    a, b = rng.sample(rng.choice(pairs(OPPOSITES)), 2)
    ways = [
        f"What is the opposite of {a}?", f"{a} is the opposite of what?",
        f"The opposite of {a} is what?",
        f"Which word is the opposite of {a}?", f"What is not {a} but the opposite?",
    ]  # fmt: skip
    return Fact(rng.choice(ways), f"what the opposite of {a} is", f"The opposite of {a} is {b}.")


def _sum(rng: random.Random) -> Fact:
    a = rng.randint(0, 9)
    b = rng.randint(0, 10 - a)
    x, y = (str(n) if rng.random() < 0.6 else NUMBERS[n] for n in (a, b))
    if rng.random() < 0.25:
        a, b = a + b, b
        ways = [f"What is {a} minus {b}?", f"What is {a} - {b}?", f"How much is {a} minus {b}?"]
        return Fact(
            rng.choice(ways),
            f"what {a} minus {b} is",
            sentence(f"{NUMBERS[a]} minus {NUMBERS[b]} is {NUMBERS[a - b]}."),
        )
    ways = [
        f"What is {x} plus {y}?", f"What is {x} + {y}?", f"How much is {x} and {y}?",
        f"Can you add {x} and {y}?",
        f"What is the sum of {x} and {y}?",
        f"{x} and {y} make how much?", f"Please add {x} and {y}.",
        f"How much is {x} plus {y}?", f"Can you add {x} to {y}?", f"Add {x} and {y} for me.",
    ]  # fmt: skip
    answer = sentence(f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}.")
    return Fact(rng.choice(ways), f"how much {x} and {y} is", answer)


def _order(rng: random.Random) -> Fact:
    kind = rng.choice(("day", "month"))
    names = members(kind)
    i = rng.randrange(len(names))
    after, before = names[(i + 1) % len(names)], names[i - 1]
    if rng.random() < 0.6:
        ways = [
            f"Which {kind} comes after {names[i]}?",
            f"What {kind} is after {names[i]}?",
            f"What comes after {names[i]}?",
        ]
        return Fact(
            rng.choice(ways),
            f"which {kind} comes after {names[i]}",
            f"{after} comes after {names[i]}.",
        )
    ways = [f"Which {kind} comes before {names[i]}?", f"What {kind} is before {names[i]}?"]
    return Fact(
        rng.choice(ways),
        f"which {kind} comes before {names[i]}",
        f"{before} comes before {names[i]}.",
    )


def _membership(rng: random.Random) -> Fact:
    kind, other = rng.sample(LISTED, 2)
    thing = rng.choice(members(kind))
    if thing in members(other):
        return _membership(rng)
    one = thing if kind in BARE else article(thing)
    right, wrong = article(kind), article(other)
    roll = rng.randrange(4)
    if roll == 0:
        first, second = rng.sample([right, wrong], 2)
        return Fact(
            f"Is {one} {first} or {second}?", f"whether {one} is {first} or {second}",
            f"{sentence(one)} is {right}.",
        )  # fmt: skip
    if roll == 1:
        return Fact(f"Is {one} {right}?", f"whether {one} is {right}", f"Yes, {one} is {right}.")
    if roll == 2:
        said = f"No, {one} is not {wrong}. {sentence(one)} is {right}."
        return Fact(f"Is {one} {wrong}?", f"whether {one} is {wrong}", said)
    return Fact(f"What is {one}?", f"what {one} is", f"{sentence(one)} is {right}.")


FACTS: tuple[Callable[[random.Random], Fact], ...] = (
    _things, _things, _things, _capital, _capital, _opposite, _sum, _order, _membership,
)  # fmt: skip
