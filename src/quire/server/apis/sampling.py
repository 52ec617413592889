"""Request fields of sampling parameters and of features, made from their declarations."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from quire.features.registry import body_fields, clash_error, origin_of_field
from quire.sampling_params import PARAMETERS, DeclaredParameter
from quire.server.http.strict_model import StrictModel


def parameters_of(api: str) -> tuple[DeclaredParameter, ...]:
    """Returns the sampling parameters that an API takes under their own names."""
    return tuple(p for p in PARAMETERS if api in p.declared.apis)


def sampling_model(api: str) -> Any:
    """Returns a model with a field for each sampling parameter of an API, to inherit from.

    Every field may be null, which asks for the default. Integers are bounded here. Numbers are
    bounded by `SamplingParams`. The model also has the fields that features declare for the API.
    """
    fields: dict[str, Any] = {
        p.name: (_field_type(p) | None, Field(None, description=p.text)) for p in parameters_of(api)
    }
    features = {key: each for key, each in body_fields().items() if api in each.apis}
    for key, each in features.items():
        if key in fields:
            raise clash_error("request field", key, "the server", origin_of_field(each))
        fields[key] = ((each.value if each.body is None else each.body) | None, None)
    model = create_model(f"{api.capitalize()}Sampling", __base__=StrictModel, **fields)
    model.feature_fields = features
    return model


def _field_type(parameter: DeclaredParameter) -> Any:
    declared = parameter.declared
    bounded = Annotated[int, Field(ge=declared.low, le=declared.high)]
    if declared.entries:
        return Annotated[list[bounded], Field(max_length=declared.entries, fail_fast=True)]
    return bounded if parameter.kind is int else parameter.kind


def copied_fields(request: BaseModel, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a request that are not null, as keywords of `SamplingParams`."""
    given = ((name, getattr(request, name)) for name in names)
    return {name: value for name, value in given if value is not None}
