"""Exchanges of the routes below /v1/messages: errors in a stream are told as Anthropic does."""

from __future__ import annotations

from services.common.errors import SluicewayError
from services.gateway.anthropic.errors import error_event
from services.gateway.generation_exchange import GenerationExchange


class MessageExchange(GenerationExchange):
    """The reply to a request for a message."""

    def error_event(self, error: SluicewayError) -> bytes:
        """See ``Exchange``."""
        return error_event(error)
