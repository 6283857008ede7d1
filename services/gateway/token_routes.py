"""What /tokenize, /detokenize and /v1/chat/completions/render do."""

from __future__ import annotations

from services.gateway.exchange import JsonObject
from services.gateway.generation import TextPrompt
from services.gateway.openai.plan import PlanContext
from services.gateway.openai.render import plan_render
from services.gateway.openai.tokenize import TokenizePlan, plan_detokenize, plan_tokenize
from services.gateway.tokenizer_client import TokenizerClient


class TokenRoutes:
    """Text to token ids and back, by the tokenizer that also serves generations."""

    def __init__(self, client: TokenizerClient, planning: PlanContext) -> None:
        """
        Args:
            client: Link to the tokenizers.
            planning: What plans are made with.
        """
        self._client = client
        self._planning = planning

    async def tokenize(self, body: JsonObject) -> JsonObject:
        """Reply of POST /tokenize."""
        plan = plan_tokenize(body, self._planning)
        if isinstance(plan.prompt, TextPrompt):
            ids, strings = await self._client.tokenize(
                plan.model, plan.prompt.text, add_special_tokens=plan.add_special_tokens
            )
            return plan.reply(ids, strings if plan.returns_strings else None)
        text, ids = await self._client.render(plan.model, plan.prompt)
        return plan.reply(ids, await self._strings(plan, text))

    async def _strings(self, plan: TokenizePlan, text: str) -> list[str] | None:
        if not plan.returns_strings:
            return None
        _, strings = await self._client.tokenize(plan.model, text, add_special_tokens=False)
        return strings

    async def detokenize(self, body: JsonObject) -> JsonObject:
        """Reply of POST /detokenize."""
        model, prompt = plan_detokenize(body, self._planning)
        text = await self._client.detokenize(model, prompt.ids, skip_special_tokens=False)
        return {"prompt": text}

    async def render(self, body: JsonObject) -> JsonObject:
        """Reply of POST /v1/chat/completions/render."""
        model, prompt = plan_render(body, self._planning)
        text, ids = await self._client.render(model, prompt)
        return {"model": model, "prompt": text, "token_ids": ids}
