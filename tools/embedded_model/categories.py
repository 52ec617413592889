"""Things by what they are: for lists in the conversations, and to judge lists in answers."""

from __future__ import annotations

CATEGORIES = {
    "fruit": "apple banana orange pear grape cherry strawberry peach plum lemon mango melon kiwi "
    "pineapple blueberry raspberry watermelon apricot lime fig",
    "vegetable": "carrot potato tomato onion pea bean cabbage lettuce cucumber spinach pumpkin "
    "broccoli pepper corn beet radish celery garlic turnip",
    "animal": "cat dog cow horse pig sheep goat rabbit mouse lion tiger bear elephant monkey fox "
    "wolf deer giraffe zebra frog snake duck hen fish bird whale turtle squirrel",
    "bird": "robin eagle owl crow duck goose swan parrot penguin sparrow pigeon hen gull stork "
    "hawk swallow turkey dove",
    "color": "red blue green yellow orange purple pink brown black white gray gold silver",
    "clothing": "hat coat shirt sock shoe glove scarf dress skirt jacket sweater boot cap belt "
    "trousers mitten",
    "toy": "ball doll kite puzzle drum blocks teddy train truck top yo-yo balloon",
    "tool": "hammer saw drill screwdriver shovel rake wrench axe broom ladder",
    "drink": "water milk tea coffee juice lemonade cocoa soda",
    "food": "bread cheese rice soup egg cake pasta pizza honey butter sandwich cookie salad",
    "season": "spring summer autumn winter",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October "
    "November December",
    "country": "France Germany Spain Italy Japan China India Canada Mexico Brazil Egypt Norway "
    "Sweden Poland Greece Turkey Kenya Peru Chile Australia",
    "city": "Paris London Rome Berlin Madrid Tokyo Oslo Vienna Lisbon Athens Cairo Dublin Moscow "
    "Prague Delhi",
    "flower": "rose tulip daisy lily sunflower violet poppy daffodil",
    "insect": "bee ant butterfly fly beetle wasp ladybug moth cricket grasshopper",
    "instrument": "piano violin guitar drum flute trumpet harp cello",
    "sport": "football tennis basketball swimming running baseball hockey golf skiing",
    "job": "teacher doctor farmer baker nurse pilot cook painter driver builder",
    "shape": "circle square triangle star oval heart diamond rectangle",
    "vehicle": "car bus train truck boat plane bicycle ship tram van",
    "body part": "head hand foot arm leg nose ear eye mouth knee finger toe",
    "piece of furniture": "table chair bed sofa desk shelf cupboard bench stool",
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
}
"""Names of a kind, by the kind's name."""


def members(kind: str) -> list[str]:
    """Returns the things of a kind."""
    return CATEGORIES[kind].split()


def plural(noun: str) -> str:
    """Returns the plural of a noun of this module."""
    known = {
        "mouse": "mice", "wolf": "wolves", "goose": "geese", "foot": "feet", "fish": "fish",
        "sheep": "sheep", "deer": "deer", "trousers": "trousers", "blocks": "blocks",
        "clothing": "pieces of clothing", "piece of furniture": "pieces of furniture",
        "food": "foods", "shelf": "shelves", "person": "people",
    }  # fmt: skip
    if noun in known:
        return known[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "o")) else "s")
