"""Lets the applications of tests share their routes.

FastAPI spends most of what an application costs on reading its handlers' signatures, and most tests
of the server make an application. Routes hold nothing of the application that they are in.
"""

from __future__ import annotations

import functools
from typing import Any

from quire.server import app as server
from quire.server import playground


def share() -> None:
    """Makes each route once in this process, for good."""
    made: dict[Any, Any] = {}
    add = server._App.add_api_route

    def add_api_route(self: Any, path: str, endpoint: Any, **settings: Any) -> None:
        key = path, endpoint, repr(settings)
        if key in made:
            self.router.routes.append(made[key])
            self.router._mark_routes_changed()
        else:
            add(self, path, endpoint, **settings)
            made[key] = self.router.routes[-1]

    server._App.add_api_route = add_api_route  # type: ignore[method-assign]
    # Its handlers are made anew for each application.
    playground._file_handler = functools.cache(playground._file_handler)
