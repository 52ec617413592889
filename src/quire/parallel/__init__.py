"""Process groups and the collectives that models need."""

from quire.parallel.group import ProcessGroup, SingleGroup, TorchGroup

__all__ = ["ProcessGroup", "SingleGroup", "TorchGroup"]
