"""``truncation: auto``: what of a conversation is left out so that it fits the model's context.

Whole turns go, the oldest first: what is left begins with what a user said. Instructions, system
and developer messages stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import orjson

from services.gateway.generation import ChatPrompt
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.transcript import messages_of

_STAYING = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Truncation:
    """A conversation that may be shortened.

    Attributes:
        prompt: The whole of it.
        instructions: See ``messages_of``.
        items: Likewise.
        num_prompt_tokens: How many there is room for.
    """

    prompt: ChatPrompt
    instructions: str | None
    items: Sequence[Item]
    num_prompt_tokens: int

    async def fitted(self, count: Callable[[ChatPrompt], Awaitable[int]]) -> ChatPrompt:
        """The longest end of the conversation that fits; its last turn, if nothing does.

        Args:
            count: Gives the tokens of a prompt.
        """

        async def fits(prompt: ChatPrompt) -> bool:
            return await count(prompt) <= self.num_prompt_tokens

        turns = self._turns()
        if not turns or await fits(self.prompt):
            return self.prompt
        low, high = 0, len(turns) - 1
        while low < high:
            middle = (low + high) // 2
            if await fits(self._from(turns[middle])):
                high = middle
            else:
                low = middle + 1
        return self._from(turns[low])

    def _turns(self) -> list[int]:
        """Where turns begin, but the first."""
        turns = [index for index, item in enumerate(self.items) if item.get("role") == "user"]
        return turns[1:]

    def _from(self, start: int) -> ChatPrompt:
        """The conversation from an item on."""
        staying = [item for item in self.items[:start] if item.get("role") in _STAYING]
        messages = messages_of(self.instructions, [*staying, *self.items[start:]])
        return replace(self.prompt, messages_json=orjson.dumps(messages).decode())
