"""LoRA adapters: many fine-tuned models on the weights of one.

`peft.py` reads an adapter and refuses what would not be computed to the letter; `projections.py`
maps its tensors to the model's stacked and shared projections; `adapter_pool.py` keeps adapters in
the host's memory and in the device's slots; `adapted_linear.py` is a linear layer with them;
`feature.py` parks requests until their adapter is in a slot; `hook.py` tells the device which row
uses which.
"""

from quire.features.lora.lora_request import LoRARequest

__all__ = ["LoRARequest"]
