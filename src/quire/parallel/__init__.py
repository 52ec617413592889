"""Process groups and the collectives that models need. `torch_group.py` has several ranks."""

from quire.parallel.group import ProcessGroup, SingleGroup

__all__ = ["ProcessGroup", "SingleGroup"]
