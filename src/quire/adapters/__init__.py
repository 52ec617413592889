"""LoRA adapters: many fine-tuned models on the weights of one.

`peft.py` reads an adapter and refuses what would not be computed to the letter; `layout.py` maps
its tensors to the model's stacked and shared projections; `pool.py` keeps adapters in the host's
memory and in the device's slots; `stage.py` is what a linear layer computes with them; `feature.py`
parks requests until their adapter is in a slot; `hook.py` tells the device which row uses which.
"""

from quire.adapters.lora_request import LoRARequest

__all__ = ["LoRARequest"]
