"""Process groups and the collectives that models need. `torch_group.py` has those of many ranks."""

from quire.parallel.group import ProcessGroup, SingleGroup

__all__ = ["ProcessGroup", "SingleGroup"]
