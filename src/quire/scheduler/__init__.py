"""The scheduler: decides what each step computes.

The engine's loop uses it like this::

    scheduler = Scheduler(config, capacity, features)
    scheduler.add(request)                   # RequestTooLargeError, RefusedError, RequestError
    plan = scheduler.plan()                  # StepPlan, or None: nothing to launch now
    progress = scheduler.update(result)      # StepProgress; results come in plan order
    scheduler.abort(request_id)              # Request, or None if it is unknown or has ended
    scheduler.wake(request_id)               # a feature became ready for a parked request

`update` returns one `StepProgress` per step: arrays for all rows, and the indices of the requests
that ended. So a steady step costs no Python work per request. Where single requests are more
convenient, iterate over it: each item is a `RequestProgress`. See `progress.py`.
"""

from quire.scheduler.feature import Feature, PlanBuilder
from quire.scheduler.order import Order
from quire.scheduler.progress import RequestProgress, SchedulerStats, StepProgress
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.text_scheduler import TextScheduler

__all__ = [
    "Feature",
    "Order",
    "PlanBuilder",
    "RequestProgress",
    "Scheduler",
    "SchedulerStats",
    "StepProgress",
    "TextScheduler",
]
