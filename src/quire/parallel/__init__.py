"""Process groups and the collectives that models need."""

from quire.parallel.group import (
    ProcessGroup,
    SingleGroup,
    TorchGroup,
    join_group,
    leave_group,
)

__all__ = ["ProcessGroup", "SingleGroup", "TorchGroup", "join_group", "leave_group"]
