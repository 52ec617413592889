"""The counts of rooms, their lines of code and their imports."""

from __future__ import annotations

from tests.repository.test_checks import tool

MODULES = {
    "quire": '"""The package."""\n',
    "quire.plan": '"""Plans."""\n\nimport numpy as np\n\nA = 1  # one\n',
    "quire.cache": "from quire import plan\n",
    "quire.cache.node": (
        "from quire import LLM\nfrom quire.plan import A\n\n\n"
        'def f():\n    """F."""\n    return A\n'
    ),
    "quire.cache.tree": "from quire.cache.node import f\nimport quire.runner.state\n",
    "quire.runner.state": "def late():\n    from quire.cache import node\n",
}


def test_rooms_of_the_package() -> None:
    rooms, arrows = tool("count_rooms").count_rooms(MODULES, "quire")
    assert rooms == {"plan": 2, "cache": 7, "runner": 2}
    assert arrows == {("cache", "plan"), ("cache", "runner"), ("runner", "cache")}


def test_rooms_of_a_folder() -> None:
    rooms, arrows = tool("count_rooms").count_rooms(MODULES, "quire.cache")
    assert rooms == {"node": 4, "tree": 2}
    assert arrows == {("tree", "node")}


def test_modules_are_named_by_their_paths() -> None:
    name = tool("count_rooms").module_name
    assert name("quire/cache/node.py") == "quire.cache.node"
    assert name("quire/cache/__init__.py") == "quire.cache"
