"""Conversations by templates: simple facts, lists of things, what the user told before, words to
say again, and questions that nobody this small can answer.

Every function of `KINDS` draws one conversation. Values are drawn from large lists and wordings
from several, so that the model learns to take the value from the question, and no sentence by
heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from categories import CATEGORIES, members, plural
from corpus import Conversation, turns
from own_chat import CAPITALS, NUMBERS, article, pairs, reword
from own_facts import (
    ANIMALS_AT_HOME,
    BARE,
    BOYS,
    CITIES,
    CLAUSES,
    DATA,
    DIRECT,
    FACTS,
    GIRLS,
    HUES,
    JOBS,
    LISTED,
    OBJECTS,
    PETS,
    RELATIVES,
    WORDS,
    asked,
    listed,
    number,
    sentence,
)

SURNAMES = ("Smith", "Brown", "Miller", "Jones", "Berg", "Green", "Hill", "Stone")
BUILDINGS = ("church", "tower", "bridge", "school", "castle")
RELATIVES_OF = ("brother", "sister", "son", "friend")


def fact(rng: random.Random) -> Conversation:
    """Draws one fact that is asked for."""
    found = rng.choice(FACTS)(rng)
    return turns(asked(found, rng), found.answer)


# -- lists -------------------------------------------------------------------------------------


def _show(kind: str, things: list[str], rng: random.Random) -> str:
    """Returns a list as an answer."""
    bare = kind in BARE and kind != "clothing"
    shown = things if bare else [plural(thing) for thing in things]
    text = sentence(listed(shown))
    n = NUMBERS[len(things)]
    if kind in DATA["special_lists"] or rng.random() < 0.5:
        return f"{text}."
    return f"{sentence(n)} {plural(kind)} are {listed(shown)}."


def things(rng: random.Random) -> Conversation:
    """Draws a request for some things of a kind, sometimes with a request for more."""
    kind = rng.choice([*CATEGORIES, "fruit", "animal", "color", "vegetable", "bird", "clothing"])
    names = members(kind)
    count = min(rng.choice((2, 3, 3, 3, 4, 5)), len(names) - 1)
    n = number(NUMBERS[count], rng)
    ways = DATA["special_lists"].get(kind, DATA["list_requests"])
    ask = rng.choice(ways).format(n=n, k=plural(kind))
    # The names keep one cyclic order, so that the likeliest next name has not been listed yet.
    first = rng.randrange(len(names))
    some = [names[(first + i) % len(names)] for i in range(count + 1)]
    row = turns(sentence(ask) if rng.random() < 0.8 else ask, _show(kind, some[:-1], rng))
    roll = rng.random()
    if roll < 0.2:
        more = rng.choice(
            ("One more, please.", "And another one?", "Can you name one more?", "Another one.")
        )
        one = some[-1] if kind in BARE and kind != "clothing" else plural(some[-1])
        row += turns(more, f"{sentence(one)}.")
    elif roll < 0.35:
        place = rng.randrange(count)
        which = ("first", "second", "third", "fourth", "fifth")[place]
        one = some[place] if kind in BARE and kind != "clothing" else plural(some[place])
        ask = rng.choice(
            (
                f"Which one was the {which}?",
                f"What was the {which} one?",
                f"What did you name {which}?",
            )
        )
        row += turns(ask, f"The {which} one was {one}.")
    elif roll < 0.45:
        first = some[0] if kind in BARE and kind != "clothing" else plural(some[0])
        second = some[1] if kind in BARE and kind != "clothing" else plural(some[1])
        row += turns(
            f"Do you like {first} or {second} better?",
            f"I am a program, but I like the word {rng.choice((first, second))}.",
        )
    return row


def choice_of(rng: random.Random) -> Conversation:
    """Draws a question for the one thing of some that is of a kind."""
    kind, *others = rng.sample(LISTED, 3)
    right = rng.choice(members(kind))
    wrong = [rng.choice(members(other)) for other in others]
    if any(w in members(kind) for w in wrong) or any(right in members(o) for o in others):
        return choice_of(rng)
    x, y, z = rng.sample([right, *wrong], 3)
    ways = (
        f"Which of these is {article(kind)}: {x}, {y} or {z}?",
        f"{sentence(x)}, {y} or {z}: which is {article(kind)}?",
        f"Find the {kind}: {x}, {y}, {z}.",
        f"Here are three words: {x}, {y} and {z}. Which one is {article(kind)}?",
    )
    return turns(
        rng.choice(ways),
        rng.choice((f"{sentence(right)} is {article(kind)}.", f"The {kind} is {right}.")),
    )


# -- what was told before ----------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Something that users tell of themselves.

    tells: statements. says: answers to them. asks: later questions. clause: what is not known if it
    was not told. found: the answers then.
    """

    values: Callable[[random.Random], str]
    tells: list[str]
    says: list[str]
    asks: list[str]
    clause: str
    found: list[str]


def _one_of(names: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(names)


def _age(rng: random.Random) -> str:
    years = (*NUMBERS[4:], "eleven", "twelve", "thirteen", "twenty", "thirty", "forty")
    return rng.choice(years) if rng.random() < 0.7 else str(rng.randint(4, 70))


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(HUES)} {rng.choice(OBJECTS)}"


_VALUES = {
    "name": _one_of(GIRLS + BOYS),
    "color": _one_of(members("color")),
    "age": _age,
    "city": _one_of(CITIES),
    "pet": _one_of(PETS),
    "food": _one_of([*members("food"), *map(plural, members("fruit")[:12])]),
    "sport": _one_of(members("sport")),
    "relative": _one_of(["{name}"]),
    "word": _one_of(WORDS),
    "job": _one_of(members("job")),
    "thing": _thing,
}
SLOTS = {name: Slot(_VALUES[name], **found) for name, found in DATA["slots"].items()}


def _names(rng: random.Random) -> dict[str, str]:
    """Draws what statements are about: a pet, and a relative with a name."""
    who = rng.choice(RELATIVES)
    his = who in ("brother", "father", "son", "uncle")
    hers = who in ("sister", "mother", "daughter", "aunt")
    name = rng.choice(BOYS if his else GIRLS if hers else GIRLS + BOYS)
    return {"pet": rng.choice(ANIMALS_AT_HOME), "who": who, "name": name}


def _fill(text: str, value: str, names: dict[str, str]) -> str:
    return text.replace("{x}", value).replace("{X}", sentence(value)).format(**names)


def recall(rng: random.Random) -> Conversation:
    """Draws a conversation in which the user tells things and asks for them later."""
    kinds = rng.sample(sorted(SLOTS), rng.choice((1, 1, 1, 2, 2, 3)))
    if "name" not in kinds and rng.random() < 0.35:
        kinds.append("name")
        rng.shuffle(kinds)
    told: dict[str, tuple[str, dict[str, str]]] = {}
    row: Conversation = []
    together = rng.random() < 0.3
    statements, reply = [], ""
    for kind in kinds:
        slot = SLOTS[kind]
        names = _names(rng)
        value = slot.values(rng).format(**names)
        told[kind] = value, names
        tell = sentence(_fill(rng.choice(slot.tells), value, names))
        reply = _fill(rng.choice(slot.says), value, names)
        if together:
            statements.append(tell)
            continue
        row += turns(tell, reply)
        if rng.random() < 0.25:
            row += aside(rng)
    if together:
        row += turns(" ".join(statements), reply)
    for kind in rng.sample(kinds, min(len(kinds), rng.choice((1, 1, 2)))):
        while rng.random() < 0.25:
            row += aside(rng)
        slot, (value, names) = SLOTS[kind], told[kind]
        ask = rng.choice(slot.asks).format(**names)
        row += turns(_led(ask, rng), _fill(rng.choice(slot.found), value, names))
    if rng.random() < 0.25:
        other = rng.choice([kind for kind in SLOTS if kind not in told])
        row += _not_told(other, rng)
    return row


def _led(question: str, rng: random.Random) -> str:
    lead = rng.choice(DATA["boost"] + ["So, ", "And ", "Now, ", "Quire, "])
    if lead.endswith(", ") or lead == "And ":
        question = question[0].lower() + question[1:]
    return sentence(lead + question)


def _not_told(kind: str, rng: random.Random) -> Conversation:
    slot = SLOTS[kind]
    names = _names(rng)
    clause = slot.clause.format(**names)
    ways = (
        "I do not know {c}. You have not told me yet.",
        "I do not know {c}, because you have not told me.",
        "You have not told me {c}.", "I am sorry, I do not know {c}.",
    )  # fmt: skip
    says = rng.choice(ways).format(c=clause)
    return turns(_led(rng.choice(slot.asks).format(**names), rng), says)


def not_told(rng: random.Random) -> Conversation:
    """Draws a question about a fact that the user has not given; sometimes the user then does."""
    kind = rng.choice(sorted(SLOTS))
    row = _not_told(kind, rng)
    if rng.random() < 0.4:
        slot = SLOTS[kind]
        names = {"pet": "dog", "who": "friend", "name": rng.choice(GIRLS + BOYS)}
        value = slot.values(rng).format(**names)
        row += turns(
            _fill(rng.choice(slot.tells), value, names), _fill(rng.choice(slot.says), value, names)
        )
        row += turns(
            _led(rng.choice(slot.asks).format(**names), rng),
            _fill(rng.choice(slot.found), value, names),
        )
    return row


def reading(rng: random.Random) -> Conversation:
    """Draws two statements on two people, and a question on one of them."""
    a, b = rng.sample(GIRLS + BOYS, 2)
    x, y = rng.sample([f"{h} {o}" for h in HUES for o in OBJECTS], 2)
    f, g = rng.sample(members("food") + members("sport"), 2)
    c, d = rng.sample(CITIES, 2)
    roll = rng.randrange(3)
    if roll == 0:
        text, who, what = (
            f"{a} has a {x} and {b} has a {y}.",
            f"Who has a {x}?",
            f"What does {b} have?",
        )
        first, second = f"{a} has a {x}.", f"{b} has a {y}."
    elif roll == 1:
        text, who, what = (
            f"{a} likes {f}. {b} likes {g}.",
            f"Who likes {f}?",
            f"What does {b} like?",
        )
        first, second = f"{a} likes {f}.", f"{b} likes {g}."
    else:
        text, who, what = (
            f"{a} lives in {c} and {b} lives in {d}.",
            f"Who lives in {c}?",
            f"Where does {b} live?",
        )
        first, second = f"{a} lives in {c}.", f"{b} lives in {d}."
    question, answer = rng.choice(((who, first), (what, second)))
    if rng.random() < 0.4:
        return [
            *turns(text, rng.choice(("I see.", "All right.", "Good to know!"))),
            *turns(question, answer),
        ]
    return turns(f"{text} {question}", answer)


# -- words to say ------------------------------------------------------------------------------


def say_again(rng: random.Random) -> Conversation:
    """Draws words that are to be said again."""
    words = " ".join(rng.sample(WORDS + GIRLS[:12] + BOYS[:12], rng.choice((1, 2, 2, 3, 3, 4, 5))))
    ask = rng.choice(DATA["say"]).format(w=words if rng.random() < 0.8 else f'"{words}"')
    return turns(ask, f"{sentence(words)}.")


# -- what is not known -------------------------------------------------------------------------


def unknown(rng: random.Random) -> Conversation:
    """Draws a question that a very small model cannot answer."""
    country = rng.choice(pairs(CAPITALS))[0]
    city, who = (
        rng.choice(CITIES),
        rng.choice((rng.choice(JOBS), "king", "queen", "president", "mayor")),
    )
    name = f"{rng.choice(GIRLS + BOYS)} {rng.choice(SURNAMES)}"
    when = rng.choice(
        (
            "yesterday",
            "last week",
            "last year",
            "this morning",
            "on Sunday",
            "last month",
            "tonight",
        )
    )
    then = rng.choice(
        (
            "tomorrow",
            "next year",
            "next month",
            "on Friday",
            "next summer",
            "tonight",
            "next Monday",
        )
    )
    place = rng.choice((country, city))
    game = rng.choice(
        ("game", "match", "race", "election", "football game", "final", "tennis match")
    )
    year = rng.randint(1200, 1990)
    item = rng.choice(("bread", "a house", "gold", "a ticket", "a car", "milk", "a phone"))
    meal = rng.choice(("breakfast", "dinner", "supper", "my birthday", "Christmas"))
    questions = [
        (f"How many people live in {place}?", f"how many people live in {place}"),
        (f"What is the population of {place}?", f"what the population of {place} is"),
        (f"Who won the {game} {when}?", f"who won the {game} {when}"),
        (f"Who will win the {game} {then}?", f"who will win the {game} {then}"),
        (f"What is the weather like in {city}?", f"what the weather is like in {city}"),
        (f"Will it rain in {city} {then}?", f"whether it will rain in {city} {then}"),
        (f"How warm will it be {then}?", f"how warm it will be {then}"),
        (f"What will the weather be {then}?", f"what the weather will be {then}"),
        (f"When was {name} born?", f"when {name} was born"),
        (f"Who is {name}?", f"who {name} is"),
        (f"When was the {who} of {country} born?", f"when the {who} of {country} was born"),
        (f"Who is the {who} of {place}?", f"who the {who} of {place} is"),
        (f"Who was the {who} of {place} in {year}?", f"who the {who} of {place} was in {year}"),
        (f"What happened in {place} in {year}?", f"what happened in {place} in {year}"),
        (f"How much does {item} cost in {city}?", f"how much {item} costs in {city}"),
        (f"What is the phone number of {name}?", f"the phone number of {name}"),
        (f"Where does {name} live?", f"where {name} lives"),
        (f"How far is it from {city} to the moon?", f"how far it is from {city} to the moon"),
        (f"What did I do {when}?", f"what you did {when}"),
        (f"What did I eat for {meal}?", f"what you ate for {meal}"),
        (
            f"What is in my {rng.choice(('pocket', 'bag', 'hand', 'room', 'garden'))}?",
            "that, because I cannot see it",
        ),
        (f"What will happen {then}?", f"what will happen {then}"),
        (f"How deep is the {rng.choice(('lake', 'river', 'sea'))} at {city}?", "how deep it is"),
        (
            f"What is {rng.randint(100, 999)} times {rng.randint(12, 99)}?",
            "that. Large numbers are too hard for me",
        ),
        (f"Which book did {name} write?", f"which book {name} wrote"),
        (f"How old is the {rng.choice(BUILDINGS)} in {city}?", "how old it is"),
        (f"What is the news from {place}?", f"the news from {place}"),
        (f"What is the name of {name}'s dog?", f"the name of {name}'s dog"),
        (
            f"How tall is the {who} of {country}'s {rng.choice(RELATIVES_OF)}?",
            "how tall that person is",
        ),
    ]  # fmt: skip
    question, clause = rng.choice(questions)
    way = rng.choice(DIRECT[:10]) if rng.random() < 0.7 else "{q}"
    if "," in clause or "." in clause:
        return turns(way.format(q=question), f"I do not know {clause}.")
    if rng.random() < 0.15:
        ask = rng.choice(CLAUSES[:8]).format(c=clause.replace("you ", "I "))
        return turns(ask, rng.choice(DATA["no_idea"]).format(c=clause))
    return turns(way.format(q=question), rng.choice(DATA["no_idea"]).format(c=clause))


# -- how people feel ---------------------------------------------------------------------------


def feelings(rng: random.Random) -> Conversation:
    """Draws something sad or glad that the user tells."""
    who = rng.choice((*RELATIVES, *ANIMALS_AT_HOME[:4], "grandma", "grandpa", "neighbor"))
    if rng.random() < 0.65:
        more = rng.choice(
            (*DATA["sad_more"], " and I am sad.", " and I feel alone.", " and now I cry.")
        )
        text = f"My {who} {rng.choice(DATA['sad'])}{'' if more.startswith(' and') else '.'}{more}"
        says = (
            f"I am sorry to hear about your {who}. I hope that things get better soon.",
            f"I am so sorry. It is hard when something happens to your {who}.",
            "I am sorry. That sounds sad. Do you want to tell me more about it?",
            f"I am sorry about your {who}. Would a little story help?",
        )
    else:
        text = f"My {who} {rng.choice(DATA['glad'])}.{rng.choice(DATA['glad_more'])}"
        says = (
            f"How nice! I am glad for you and your {who}.", "That is wonderful! Tell me more.",
            f"That is good news! Your {who} must be happy too.",
        )  # fmt: skip
    return turns(text, rng.choice(says))


def aside(rng: random.Random) -> Conversation:
    """Draws a turn that has nothing to do with what was told."""
    return rng.choice((fact, fact, things, say_again, feelings, unknown))(rng)[:2]


KINDS: dict[str, tuple[Callable[[random.Random], Conversation], int]] = {
    "fact": (fact, 7), "things": (things, 5), "choice": (choice_of, 2), "recall": (recall, 9),
    "not told": (not_told, 2), "reading": (reading, 3), "say": (say_again, 3),
    "unknown": (unknown, 5),
    "feelings": (feelings, 2),
}  # fmt: skip
"""Kinds of conversations: the function that draws one, and its weight among all."""


def draw(count: int, rng: random.Random) -> list[Conversation]:
    """Returns so many conversations; one in six of them is several, one after the other."""
    kinds, weights = zip(*KINDS.values(), strict=True)
    rows = []
    for _ in range(count):
        row = rng.choices(kinds, weights)[0](rng)
        while rng.random() < 0.17:
            row = row + rng.choices(kinds, weights)[0](rng)
        if rng.random() < 0.3:
            row = [
                {**m, "content": reword(m["content"], rng)} if m["role"] == "user" else m
                for m in row
            ]
        rows.append(row)
    return rows
