"""Features of other packages that cannot be loaded, or that take a name that is taken."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

import quire.config
from quire.cli.settings import check_names
from quire.config import FeatureArgs, setting
from quire.errors import ConfigError
from quire.features import registry
from quire.features.call import CallType, RequestField
from quire.features.spec import FeatureSpec
from quire.sampling_params import OPENAI
from quire.server.apis.route import Route
from quire.server.routes import with_features

OWN = "quire.features.lora:FEATURE (Quire)"
MADE = "test_made"
"""A module that tests fill with the parts of their features."""


@dataclass(frozen=True, kw_only=True)
class PortArgs(FeatureArgs):
    """A setting that the server has too."""

    port: int = setting(0, "A port.")


@dataclass(frozen=True, kw_only=True)
class SeedArgs(FeatureArgs):
    """A setting that the engine has too."""

    seed: int = setting(0, "A seed.")


@dataclass(frozen=True, kw_only=True)
class LoRADirArgs(FeatureArgs):
    """A setting that another feature has too."""

    lora_dir: str | None = setting(None, "A folder.")


PARTS: dict[str, Any] = {
    "PORT": PortArgs,
    "SEED": SeedArgs,
    "LORA_DIR": LoRADirArgs,
    "CALLS": (CallType("lora.load", int, int),),
    "FIELDS": (RequestField("lora.adapter", int),),
    "FIRST": (RequestField("one.field", int, key="same", apis=(OPENAI,)),),
    "SECOND": (RequestField("two.field", int, key="same", apis=(OPENAI,)),),
    "ROUTES": (Route("post", "/v1/load_lora_adapter", None, ""),),
}

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Returns a function that stands for the installation of packages with these features."""
    module = ModuleType(MADE)
    vars(module).update(PARTS)
    monkeypatch.setitem(sys.modules, MADE, module)
    caches = registry._installed, registry.declared_calls, registry.declared_fields
    caches = *caches, registry.body_fields
    known = quire.config.EngineArgs

    def install(**features: Any) -> None:
        vars(module).update(features)
        found = [
            importlib.metadata.EntryPoint(name, f"{MADE}:{name}", registry.GROUP)
            for name in features
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
        for each in caches:
            each.cache_clear()
        del quire.config.EngineArgs
        vars(quire.config).pop("_features_load", None)

    yield install
    monkeypatch.undo()
    for each in caches:
        each.cache_clear()
    quire.config.EngineArgs = known


def spec(name: str = "other", **parts: str) -> FeatureSpec:
    places = {kind: f"{MADE}:{place}" for kind, place in parts.items()}
    return FeatureSpec(name=name, loop="nowhere:nothing", **places)


def refusal() -> str:
    """Returns the error of an engine that starts with the installed features."""
    with pytest.raises(ConfigError) as caught:
        quire.config.EngineArgs()
    return str(caught.value)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (3, "cannot be loaded: TypeError: it is a int, not a FeatureSpec"),
        (spec(args="NOWHERE"), "cannot be loaded: AttributeError: module 'test_made' has no"),
        (spec("lora"), f"the name 'lora' of the feature {MADE}:made is taken by {OWN}"),
        (
            spec(args="SEED"),
            f"the setting 'seed' of the feature {MADE}:made is taken by the engine",
        ),
        (
            spec(args="LORA_DIR"),
            f"the setting 'lora_dir' of the feature {MADE}:made is taken by {OWN}",
        ),
        (
            FeatureSpec(name="x", loop="a:b", stats="a:b", stats_name="adapters"),
            f"the statistics 'adapters' of the feature {MADE}:made is taken by {OWN}",
        ),
    ],
)
def test_an_engine_refuses_to_start(install: Install, feature: Any, message: str) -> None:
    install(made=feature)
    assert message in refusal()
    names = [each.name for each in registry.installed_features()]
    assert names.count("lora") == 1
    assert "other" not in names or "seed" in message


def test_a_module_that_fails_is_named(install: Install) -> None:
    install(made=spec())
    failing = importlib.metadata.EntryPoint("failing", "no_such_module:FEATURE", registry.GROUP)
    installed = registry._Installed()
    installed.add("no_such_module:FEATURE (package broken)", failing.load)
    (error,) = installed.errors
    assert str(error) == (
        "the feature no_such_module:FEATURE (package broken) cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_the_second_of_two_is_refused(install: Install) -> None:
    install(one=spec("same"), two=spec("same"))
    message = f"the name 'same' of the feature {MADE}:two is taken by {MADE}:one"
    assert refusal() == message
    assert [each.origin for each in registry.installed_features() if each.name == "same"] == [
        f"{MADE}:one"
    ]


def test_calls_and_fields_have_one_owner(install: Install) -> None:
    install(made=spec(calls="CALLS", fields="FIELDS"))
    with pytest.raises(ConfigError, match=r"the call 'lora\.load' of the feature test_made:made"):
        registry.declared_calls()
    with pytest.raises(ConfigError, match=r"the request field 'lora\.adapter' of the feature"):
        registry.declared_fields()


def test_keys_of_bodies_have_one_owner(install: Install) -> None:
    install(one=spec("one", fields="FIRST"), two=spec("two", fields="SECOND"))
    with pytest.raises(ConfigError, match="'same' of the feature test_made:two is taken by test_"):
        registry.body_fields()


def test_an_engine_without_the_feature_refuses(install: Install) -> None:
    call, (field,), (plain,) = PARTS["CALLS"][0], PARTS["FIRST"], PARTS["FIELDS"]
    assert str(call.refuse()) == "this engine does not take the call 'lora.load'"
    error = field.refuse(3)
    assert str(error) == "'same' is not supported: the engine runs without its feature"
    assert error.param == "same"
    assert plain.refuse(3) is None


def test_routes_have_one_owner(install: Install) -> None:
    install(made=spec(routes="ROUTES"))
    with pytest.raises(ConfigError, match="the route 'post /v1/load_lora_adapter' of the feature"):
        list(with_features((), registry.installed_features()))
    own = PARTS["ROUTES"]
    with pytest.raises(ConfigError, match="is taken by the server"):
        list(with_features(own, registry.installed_features()))


def test_a_feature_without_a_clash_gets_its_settings(install: Install) -> None:
    install(made=spec(args="PORT"))
    args = quire.config.EngineArgs(port=3)
    assert PortArgs.of(args) == PortArgs(port=3)
    with pytest.raises(ConfigError, match="port must be int"):
        quire.config.EngineArgs(port="x")
    assert registry.origin_of_setting("port") == f"{MADE}:made"
    with pytest.raises(ConfigError, match="'port' of the feature test_made:made is taken by the s"):
        check_names(quire.config.EngineArgs)
