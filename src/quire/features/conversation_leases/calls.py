"""A turn names its conversation by a request field, and a call ends the conversation's lease."""

from __future__ import annotations

import contextlib

from quire.errors import QuireError
from quire.features.call import Callers, CallType, RequestField

CONVERSATION: RequestField[str] = RequestField("conversation_leases.conversation", str)
"""The conversation that keeps a request's KV. An engine without leases ignores it."""
FIELDS = (CONVERSATION,)

END: CallType[str, bool] = CallType("conversation_leases.end", str, bool)
"""Ends a conversation's lease; answers whether it had one."""
CALLS = (END,)


async def end_lease(client: Callers, conversation: str) -> None:
    """Ends a conversation's leases in all engines."""
    for engine in client.replicas:
        # A dead engine has no leases, and one without the feature refuses the call.
        with contextlib.suppress(QuireError):
            await engine.call(END, conversation)
