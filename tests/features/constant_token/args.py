"""The setting: a keyword of `LLM`, a flag, a variable and a YAML key."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import FeatureArgs, Limit, setting

NONE = -1
"""Stands for no token: the model chooses."""


@dataclass(frozen=True, kw_only=True)
class ConstantTokenArgs(FeatureArgs):
    """The default of all requests."""

    constant_token: int = setting(
        NONE,
        "Token that completions of requests without one repeat; -1 lets the model choose.",
        limit=Limit(lambda token: token >= NONE, "at least -1"),
        subject="Model",
    )
