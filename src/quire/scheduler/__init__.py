"""The scheduler: decides what each step computes.

The engine's loop uses it like this::

    scheduler = Scheduler(config, capacity, features)
    scheduler.add(request)                   # RequestTooLargeError, RefusedError, RequestError
    plan = scheduler.plan()                  # StepPlan, or None: nothing to launch now
    progress = scheduler.update(result)      # StepProgress; results come in plan order
    scheduler.abort(request_id)              # Request, or None if it is unknown or has ended
    scheduler.wake(request_id)               # a feature became ready for a parked request

`update` returns one `StepProgress` per step rather than a list of `Progress`: arrays for all rows
and the indices of those that ended, so that a steady step costs no Python work per request. It can
be iterated for one `Progress` per request where that is more convenient. See `progress.py`.
"""

from quire.scheduler.feature import Feature, PlanBuilder
from quire.scheduler.order import Order
from quire.scheduler.progress import Progress, SchedulerStats, StepProgress
from quire.scheduler.scheduler import Scheduler

__all__ = [
    "Feature",
    "Order",
    "PlanBuilder",
    "Progress",
    "Scheduler",
    "SchedulerStats",
    "StepProgress",
]
