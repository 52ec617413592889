"""The project's own chat lines: who the model is, how it greets, simple facts, story requests.

`own_data/intents.jsonl` holds written questions and answers by intent; this module varies the
wording, adds small facts, asks for stories by the animal they are about, and joins single turns to
conversations.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from corpus import Conversation, turns

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Quire, a tiny and friendly language model.",
    "You are a friendly assistant. Keep your answers short.",
    "You are a helpful, honest assistant.",
    "Answer the user.",
    "You are Quire.",
)
CAPITALS = (
    "France:Paris|Germany:Berlin|Spain:Madrid|Italy:Rome|Portugal:Lisbon|England:London|"
    "the United Kingdom:London|Ireland:Dublin|Scotland:Edinburgh|Greece:Athens|Austria:Vienna|"
    "Belgium:Brussels|the Netherlands:Amsterdam|Denmark:Copenhagen|Sweden:Stockholm|Norway:Oslo|"
    "Finland:Helsinki|Poland:Warsaw|Hungary:Budapest|Romania:Bucharest|Russia:Moscow|Ukraine:Kyiv|"
    "Turkey:Ankara|Egypt:Cairo|Kenya:Nairobi|Morocco:Rabat|Nigeria:Abuja|Ethiopia:Addis Ababa|"
    "India:New Delhi|China:Beijing|Japan:Tokyo|South Korea:Seoul|Thailand:Bangkok|Vietnam:Hanoi|"
    "Indonesia:Jakarta|Australia:Canberra|New Zealand:Wellington|Canada:Ottawa|Mexico:Mexico City|"
    "the United States:Washington, D.C.|Brazil:Brasilia|Argentina:Buenos Aires|Chile:Santiago|"
    "Peru:Lima|Colombia:Bogota|Cuba:Havana|Switzerland:Bern|the Czech Republic:Prague|"
    "Iceland:Reykjavik|Israel:Jerusalem|Iran:Tehran|Iraq:Baghdad|Saudi Arabia:Riyadh"
)
SOUNDS = (
    "cat:meow|dog:woof|cow:moo|sheep:baa|duck:quack|pig:oink|horse:neigh|lion:roar|frog:ribbit|"
    "bee:buzz|mouse:squeak|owl:hoot|rooster:cock-a-doodle-doo|snake:hiss|bird:tweet|hen:cluck"
)
OPPOSITES = (
    "hot:cold|big:small|up:down|happy:sad|day:night|old:young|fast:slow|light:dark|good:bad|"
    "wet:dry|full:empty|open:closed|loud:quiet|hard:soft|high:low|left:right|rich:poor|"
    "strong:weak|clean:dirty|early:late|long:short|black:white|yes:no|in:out|near:far"
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ANIMALS = [
    "cat",
    "dog",
    "bird",
    "bear",
    "rabbit",
    "bunny",
    "fish",
    "frog",
    "horse",
    "lion",
    "mouse",
    "monkey",
    "fox",
    "duck",
    "elephant",
    "owl",
    "pig",
    "turtle",
    "tiger",
    "squirrel",
    "butterfly",
    "dragon",
    "cow",
    "spider",
    "snail",
    "princess",
    "fairy",
    "robot",
    "dinosaur",
    "wolf",
    "kitten",
    "puppy",
    "bee",
    "ant",
    "worm",
    "whale",
    "crab",
    "snake",
    "giraffe",
    "pony",
    "penguin",
    "king",
    "queen",
    "knight",
    "pirate",
    "farmer",
    "doctor",
    "train",
    "truck",
    "car",
    "boat",
    "tree",
    "flower",
    "doll",
    "ball",
    "toy",
    "cake",
    "garden",
    "beach",
    "forest",
    "castle",
    "moon",
    "star",
    "rainbow",
    "snowman",
    "balloon",
    "kite",
    "grandma",
    "teacher",
]
STORY_REQUESTS = (
    "tell me a story about {x}",
    "Tell me a story about {x}.",
    "Can you tell me a story about {x}?",
    "write a short story about {x}",
    "Write a story about {x}.",
    "a story about {x} please",
    "I would like a story about {x}.",
    "make up a story about {x}",
    "story about {x}",
    "Please tell me a short story about {x}.",
    "do you know a story about {x}?",
    "tell me a bedtime story about {x}",
)
PLAIN_STORY_REQUESTS = (
    "tell me a story",
    "Tell me a story.",
    "Can you tell me a story?",
    "tell me another story",
    "I want a story",
    "Write a short story.",
    "tell me a bedtime story",
    "a story please",
    "Please tell me a story.",
    "yes, tell me a story",
    "another story please",
)


def pairs(text: str) -> list[tuple[str, str]]:
    """`a:b|c:d` as [(a, b), (c, d)]."""
    return [(item.split(":")[0], item.split(":")[1]) for item in text.split("|")]


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def facts() -> list[Conversation]:
    """Capitals, animal sounds, opposites and one-digit sums, each asked in several ways."""
    rows = []
    for country, city in pairs(CAPITALS):
        answer = f"The capital of {country} is {city.removesuffix('.')}."
        for ask in (
            f"What is the capital of {country}?",
            f"what is the capital of {country}",
            f"what's the capital of {country}?",
            f"capital of {country}?",
            f"Tell me the capital of {country}.",
            f"Do you know the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"name the capital of {country}",
        ):
            rows.append(turns(ask, answer))
        rows.append(turns(f"Which country has {city} as its capital?", f"It is {country}."))
    for animal, sound in pairs(SOUNDS):
        answer = f"{article(animal).capitalize()} says {sound}."
        for ask in (
            f"what does {article(animal)} say?",
            f"what sound does {article(animal)} make?",
            f"What sound does a {animal} make?",
            f"what noise does the {animal} make?",
        ):
            rows.append(turns(ask, answer))
    for a, b in [*pairs(OPPOSITES), *((y, x) for x, y in pairs(OPPOSITES))]:
        for ask in (f"what is the opposite of {a}?", f"What's the opposite of {a}?"):
            rows.append(turns(ask, f"The opposite of {a} is {b}."))
    for a in range(6):
        for b in range(6 - a):
            answer = f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}.".capitalize()
            for ask in (
                f"what is {a} + {b}?",
                f"what is {a} plus {b}?",
                f"{a}+{b}",
                f"{a} + {b} = ?",
                f"what is {NUMBERS[a]} plus {NUMBERS[b]}?",
                f"how much is {a} + {b}?",
                f"What's {a}+{b}?",
            ):
                rows.append(turns(ask, answer))
    return rows


def reword(question: str, rng: random.Random) -> str:
    """The question with another capital, ending or address."""
    roll = rng.random()
    if roll < 0.35:
        question = question[0].upper() + question[1:]
    elif roll < 0.5:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.! ")
    elif question[-1].isalpha() and rng.random() < 0.3:
        question += rng.choice([".", "!", "."])
    if rng.random() < 0.08:
        question = rng.choice(["hi, ", "Hello! ", "hey, ", "Quire, ", "ok, ", "so, "]) + question
    return question


def intents(path: Path) -> tuple[list[tuple[str, Conversation]], list[Conversation]]:
    """((kind, pair) for training, held-out pairs): one wording in twelve is held out."""
    train, held, count = [], [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for i, ask in enumerate(entry["ask"]):
            count += 1
            if count % 12 == 0 and len(entry["ask"]) > 3:
                held.append(turns(ask, entry["say"][0]))
                continue
            for say in entry["say"][i % 2 :: 2] or entry["say"]:
                train.append((entry["kind"], turns(ask, say)))
    return train, held


def topic_stories(
    stories: list[str], rng: random.Random, per_topic: int = 150
) -> list[Conversation]:
    """Stories asked for by what they are about: a noun of ANIMALS named at least three times."""
    by_topic: dict[str, list[str]] = {}
    for story in stories:
        words = re.findall(r"[a-z]+", story.lower())
        if len(words) > 260:
            continue
        counts = {noun: words.count(noun) + words.count(noun + "s") for noun in ANIMALS}
        best = max(counts, key=lambda noun: counts[noun])
        if counts[best] >= 3:
            by_topic.setdefault(best, []).append(story)
    rows = []
    for noun, found in sorted(by_topic.items()):
        for story in rng.sample(found, min(per_topic, len(found))):
            x = rng.choice([article(noun), article(noun), f"a little {noun}", f"the {noun}"])
            rows.append(turns(rng.choice(STORY_REQUESTS).format(x=x), story))
    short = [story for story in stories if len(story) < 900]
    for story in rng.sample(short, min(600, len(short))):
        rows.append(turns(rng.choice(PLAIN_STORY_REQUESTS), story))
    return rows


def conversations(
    own: list[tuple[str, Conversation]], told: list[Conversation], count: int, rng: random.Random
) -> list[Conversation]:
    """Single turns joined: a greeting, two to four questions (perhaps a story), thanks, goodbye."""
    by_kind: dict[str, list[Conversation]] = {}
    for kind, pair in own:
        by_kind.setdefault(kind, []).append(pair)
    middle = [k for k in sorted(by_kind) if k not in ("greet", "bye", "thanks", "praise")]
    rows = []
    for _ in range(count):
        parts = [rng.choice(by_kind["greet"])] if rng.random() < 0.6 else []
        for _ in range(rng.randint(1, 3)):
            parts.append(rng.choice(by_kind[rng.choice(middle)]))
        if rng.random() < 0.35:
            parts.append(rng.choice(told))
            if rng.random() < 0.7:
                parts.append(rng.choice(by_kind[rng.choice(("thanks", "praise"))]))
        if rng.random() < 0.4:
            parts.append(rng.choice(by_kind["thanks"]))
        if rng.random() < 0.4:
            parts.append(rng.choice(by_kind["bye"]))
        row: Conversation = []
        for ask, say in parts:
            row += [{"role": "user", "content": reword(ask["content"], rng)}, say]
        rows.append(row)
    return rows


def with_system(row: Conversation, rng: random.Random, share: float = 0.2) -> Conversation:
    """The conversation, with a system prompt before it in `share` of the cases."""
    if row[0]["role"] == "system" or rng.random() >= share:
        return row
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *row]
