"""The installed features: those of `quire.features`, and those of other packages.

A package adds a feature by an entry point of the group `quire.features`, which names its
`FeatureSpec`. A feature that cannot be loaded, or repeats a name, is left out. An engine then
refuses to start, with an error that names the feature (`feature_errors`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import quire.features
from quire.errors import ConfigError
from quire.features.spec import FeatureSpec, resolve

GROUP = "quire.features"
"""The group of entry points that name features of other packages."""
_ENGINE = "the engine"


class _Installed:
    """The loaded features, the errors of the others, and the declarer of each name."""

    def __init__(self) -> None:
        self.specs: list[FeatureSpec] = []
        self.errors: list[ConfigError] = []
        self._owners: dict[tuple[str, str], str] = {}

    def add(self, origin: str, load: Callable[[], Any]) -> None:
        """Adds a feature, or its error.

        Args:
            origin: the package and the place of the feature, for errors.
            load: imports its `FeatureSpec`.
        """
        try:
            spec = load()
            if not isinstance(spec, FeatureSpec):
                raise TypeError(f"it is a {type(spec).__name__}, not a FeatureSpec")
            spec = dataclasses.replace(spec, origin=origin)
            names = list(_declared_names(spec))
        # Another package's module may raise anything.
        except Exception as error:
            self.errors.append(
                ConfigError(
                    f"the feature {origin} cannot be loaded: {type(error).__name__}: {error}"
                )
            )
            return
        for kind, name in names:
            owner = self._owners.get((kind, name))
            if owner is not None:
                self.errors.append(clash_error(kind, name, owner, origin))
                return
        self._owners |= dict.fromkeys(names, origin)
        self.specs.append(spec)


def _declared_names(spec: FeatureSpec) -> Iterator[tuple[str, str]]:
    """Yields the names that a feature declares, each with its kind. The names of calls and routes
    are left out."""
    yield "name", spec.name
    if spec.stats:
        yield "statistics", spec.stats_name
    if spec.args:
        for each in dataclasses.fields(resolve(spec.args)):
            yield "setting", each.name


def clash_error(kind: str, name: str, first: str, second: str) -> ConfigError:
    """Returns the error for a name that is declared twice.

    Args:
        kind: the kind of thing that has the name.
        first: origin of the first declaration.
        second: origin of the second declaration.
    """
    return ConfigError(f"the {kind} {name!r} of the feature {second} is taken by {first}")


@functools.cache
def _installed() -> _Installed:
    found = _Installed()
    for folder in pkgutil.iter_modules(quire.features.__path__):
        if folder.ispkg:
            place = f"{quire.features.__name__}.{folder.name}:FEATURE"
            found.add(f"{place} (Quire)", functools.partial(resolve, place))
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = "" if entry.dist is None else f" (package {entry.dist.name})"
        found.add(f"{entry.value}{package}", entry.load)
    return found


def installed_features() -> tuple[FeatureSpec, ...]:
    """Returns the features that could be loaded."""
    return tuple(_installed().specs)


def feature_errors() -> list[ConfigError]:
    """Returns the errors of features that could not be loaded or that repeat a name."""
    return _installed().errors


def feature_args(core: type[Any]) -> list[type[Any]]:
    """Returns the classes of features' settings.

    Args:
        core: the engine's own settings, whose names features cannot have.
    """
    taken = {each.name for each in dataclasses.fields(core)}
    found = []
    for spec in [each for each in _installed().specs if each.args]:
        args = resolve(spec.args)
        repeated = taken.intersection(each.name for each in dataclasses.fields(args))
        if repeated:
            _installed().errors.append(clash_error("setting", min(repeated), _ENGINE, spec.origin))
        else:
            found.append(args)
    return found


def origin_of_setting(name: str) -> str:
    """Returns the `FeatureSpec.origin` of the feature that declares a setting."""
    specs = (spec for spec in installed_features() if spec.args)
    return next(
        spec.origin
        for spec in specs
        if name in {each.name for each in dataclasses.fields(resolve(spec.args))}
    )


def collect_declarations(
    features: Iterable[FeatureSpec], kind: str, place: Callable[[FeatureSpec], str]
) -> dict[str, Any]:
    """Returns the calls, or the request fields, that features declare, by name.

    Args:
        kind: the kind of the declared things, for errors.
        place: returns the "module:name" of a feature's tuple of them.

    Raises:
        ConfigError: two features declare one name.
    """
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for spec in features:
        for each in resolve(place(spec)) if place(spec) else ():
            if each.name in found:
                raise clash_error(kind, each.name, owners[each.name], spec.origin)
            found[each.name], owners[each.name] = each, spec.origin
    return found


@functools.cache
def declared_calls() -> dict[str, Any]:
    """Returns every `CallType` that a feature declares, whether the feature runs or not."""
    return collect_declarations(installed_features(), "call", lambda spec: spec.calls)


@functools.cache
def declared_fields() -> dict[str, Any]:
    """Returns every `RequestField` that a feature declares."""
    return collect_declarations(installed_features(), "request field", lambda spec: spec.fields)


@functools.cache
def body_fields() -> dict[str, Any]:
    """Returns the `RequestField`s that bodies of HTTP requests have, by key."""
    found: dict[str, Any] = {}
    for each in declared_fields().values():
        if each.key in found:
            raise clash_error(
                "request field", each.key, origin_of_field(found[each.key]), origin_of_field(each)
            )
        if each.key:
            found[each.key] = each
    return found


def origin_of_field(field: Any) -> str:
    """Returns the `FeatureSpec.origin` of the feature that declares a `RequestField`."""
    specs = (spec for spec in installed_features() if spec.fields)
    return next(spec.origin for spec in specs if field in resolve(spec.fields))
