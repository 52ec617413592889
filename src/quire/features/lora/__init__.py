"""LoRA adapters: many fine-tuned models on the weights of one.

- `peft.py` reads an adapter, and refuses it if it would not be computed exactly.
- `projections.py` maps its tensors to the model's stacked and shared projections.
- `adapter_pool.py` keeps adapters in the host's memory and in the device's slots.
- `adapted_linear.py` is a linear layer with adapters.
- `feature.py` parks requests until their adapter is in a slot.
- `hook.py` gives the device each row's slot.
"""

from typing import TYPE_CHECKING, Any

from quire.features.spec import FeatureSpec, resolve

if TYPE_CHECKING:
    from quire.features.lora.lora_request import LoRARequest

__all__ = ["FEATURE", "LoRARequest"]

FEATURE = FeatureSpec(
    name="lora",
    order=100,  # After features that refuse requests, so no refused request is bound to an adapter.
    args="quire.features.lora.args:LoRAArgs",
    loop="quire.features.lora.feature:AdapterFeature",
    hook="quire.features.lora.hook:AdapterHook",
    enabled=lambda args: bool(args.lora_dir or args.lora or args.enable_lora),
    check="quire.features.lora.args:check_settings",
    whole_steps="LoRA adapters, which find their rows in a whole step",
    calls="quire.features.lora.calls:CALLS",
    keywords={"lora_request": "quire.features.lora.lora_request:load_requested"},
    models="quire.features.lora.named_models:AdapterModels",
    routes="quire.features.lora.api:ROUTES",
    fields="quire.features.lora.calls:FIELDS",
    stats="quire.features.lora.stats:AdapterStats",
    stats_name="adapters",
    metrics="quire.features.lora.metrics:collect",
)


def __getattr__(name: str) -> Any:
    # An engine without adapters imports this file for `FEATURE` only.
    if name == "LoRARequest":
        return resolve("quire.features.lora.lora_request:LoRARequest")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
