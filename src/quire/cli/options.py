"""Options that are declared once, as the fields of a class, for commands to take as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def with_options(options: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of a class, in place of its keyword of that class.

    options: a dataclass with a field for each option, of a type as a command's parameter has it.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = inspect.signature(options, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        taken = ""
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.annotation is options:
                taken = parameter.name
                parameters += fields.values()
            else:
                parameters.append(parameter)

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in fields}
            return command(**values, **{taken: options(**given)})

        set_parameters(run, parameters)
        return run

    return decorate


def set_parameters(run: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Makes a function that stands for a command show these parameters instead of its own."""
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__dict__["__wrapped__"]
