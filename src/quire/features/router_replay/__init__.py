"""Returns the experts that each token of a request was given.

Trainers route the same tokens to the same experts (router replay, arXiv:2510.11370). `hook.py`
keeps the ids that the routers write, and copies them with a step's results. `feature.py` refuses
requests that the engine cannot serve, and prefix hits, which compute no experts.
"""

from quire.features.spec import FeatureSpec

_HERE = "quire.features.router_replay"

FEATURE = FeatureSpec(
    name="router_replay",
    order=55,  # After images, before features that decide on tokens.
    args=f"{_HERE}.args:RouterReplayArgs",
    enabled=lambda args: args.enable_return_routed_experts,
    requested=lambda params, options: params.return_routed_experts,
    check=f"{_HERE}.args:check_settings",
    config=f"{_HERE}.args:count_experts",
    whole_steps="enable_return_routed_experts: routers write the experts of whole steps",
    loop=f"{_HERE}.feature:RouterReplay",
    hook=f"{_HERE}.hook:open_hook",
)
