"""Requests for stories by what they are about, and stories that keep to it.

A story is taken whose noun or name occurs often, and both may be exchanged for others: a story of a
dog becomes one of a fox. So the same story is told of many things, and only the request says which.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from categories import plural
from corpus import Conversation, turns
from own_chat import article
from own_facts import BOYS, DATA, GIRLS

CREATURES, OBJECTS, TRAITS, _GIRLS, _BOYS = (
    DATA["stories"][key].split() for key in ("creatures", "objects", "traits", "girls", "boys")
)
_STORY_GIRLS, _STORY_BOYS = {*GIRLS, *_GIRLS}, {*BOYS, *_BOYS}


def about(stories: list[str], count: int, rng: random.Random) -> list[Conversation]:
    """Returns so many requests with stories, from those that have a subject."""
    known = [found for story in stories if (found := subject(story)) is not None]
    nouns = [found for found in known if found[1] is not None]
    return [
        _request(*rng.choice(nouns if rng.random() < 0.7 else known), rng) for _ in range(count)
    ]


def subject(story: str) -> tuple[str, str | None, str | None] | None:
    """Returns the story, the noun that it is about and its hero's name, or None if it has neither.

    The noun occurs four times or more, and early; a name three times or more.
    """
    words = re.findall(r"[A-Za-z]+", story)
    if not 40 <= len(words) <= 260:
        return None
    counts = Counter(word.lower() for word in words)
    early = {word.lower() for word in words[: len(words) // 4]}
    noun = max(CREATURES + OBJECTS, key=lambda n: counts[n] + counts[plural(n)])
    good = counts[noun] + counts[plural(noun)] >= 4 and noun in early
    names = Counter(word for word in words if word in _STORY_GIRLS or word in _STORY_BOYS)
    hero = next((name for name, n in names.most_common(1) if n >= 3), None)
    if not good and hero is None:
        return None
    return story, noun if good else None, hero


def _request(story: str, noun: str | None, hero: str | None, rng: random.Random) -> Conversation:
    text = story
    if noun is not None and rng.random() < 0.75:
        other = rng.choice(CREATURES if noun in CREATURES else OBJECTS)
        if not re.search(rf"\b({other}|{plural(other)})\b", text, re.IGNORECASE):
            text, noun = exchange(text, noun, other), other
    kind = ""
    if hero is not None:
        girl = hero in _STORY_GIRLS
        kind = "girl" if girl else "boy"
        if rng.random() < 0.8:
            other = rng.choice([n for n in (GIRLS if girl else BOYS) if n not in text])
            text, hero = re.sub(rf"\b{hero}\b", other, text), other
    what = "" if noun is None else article(noun)
    child = f"a {rng.choice(('', '', 'little '))}{kind} named {hero}"
    if noun is not None and (hero is None or rng.random() < 0.7):
        x = what
        trait = next((t for t in TRAITS if re.search(rf"\b{t} {noun}\b", text)), None)
        if trait is not None and rng.random() < 0.5:
            x = article(f"{trait} {noun}")
        if hero is not None and rng.random() < 0.3:
            x = rng.choice(
                (
                    f"{child} and {what}",
                    f"{x} and {child}",
                    f"{hero} and {what}",
                    f"{child} and the {noun}",
                )
            )
    else:
        x = rng.choice((child, child, hero or ""))
    return turns(rng.choice(DATA["stories"]["requests"]).format(x=x), text)


def exchange(text: str, noun: str, other: str) -> str:
    """Returns the text with one noun for another, also in the plural, and its article."""
    a = article(other).split()[0]

    def swap(match: re.Match[str]) -> str:
        before, word = match[1] or "", match[2]
        new = plural(other) if word.lower() == plural(noun) and plural(noun) != noun else other
        new = new.capitalize() if word[0].isupper() else new
        if before.strip().lower() in ("a", "an"):
            before = (a.capitalize() if before[0].isupper() else a) + " "
        return before + new

    return re.sub(rf"(\b[Aa]n? )?\b({noun}|{plural(noun)})\b", swap, text, flags=re.IGNORECASE)
