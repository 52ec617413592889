"""A feature of another package: completions that repeat one token."""

from quire.features.spec import FeatureSpec

_HERE = "tests.features.constant_token"

FEATURE = FeatureSpec(
    name="constant_token",
    loop=f"{_HERE}.feature:ConstantToken",
    hook=f"{_HERE}.hook:ConstantTokenHook",
    args=f"{_HERE}.args:ConstantTokenArgs",
    enabled=lambda args: True,
    calls=f"{_HERE}.calls:CALLS",
    fields=f"{_HERE}.calls:FIELDS",
    stats=f"{_HERE}.metrics:ConstantTokenStats",
    stats_name="constant_token",
    live_rows=f"{_HERE}.metrics:LIVE_ROWS",
    metrics=f"{_HERE}.metrics:collect",
    routes=f"{_HERE}.api:ROUTES",
)
