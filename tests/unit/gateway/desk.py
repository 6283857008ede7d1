"""The way of a request through the gateway without HTTP and gRPC: plan, fake tokenizer, reply.

Every message is really made and read (``convert.py``), so what is tested here is all but transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from services.common.pb import tokenizer_pb2
from services.gateway.anthropic.plan import plan_message
from services.gateway.body import parse_object
from services.gateway.convert import (
    info_from_message,
    request_to_message,
    update_from_message,
)
from services.gateway.fleet import Fleet
from services.gateway.generation import Update
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.completions import plan_completion
from services.gateway.openai.fields import UnknownFields
from services.gateway.openai.plan import Caller, Limits, Plan, PlanContext
from services.gateway.openai.responses.plan import ResponsePlan, plan_response
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.parsers import Parsers
from tests.fakes.tokenizer import MODEL, Performance, Script, Vocabulary, ready_info

Body = dict[str, Any]
NOW = 1_700_000_000


def planning(
    *, trusts_templates: bool = False, tool_calls: str = "none", reasoning: str = "none"
) -> PlanContext:
    """One ready model, and the parsers that are set."""
    parsers = Parsers(tool_calls=tool_calls, reasoning=reasoning)
    fleet = Fleet(clock=lambda: 0.0)
    fleet.heard("a:1", info_from_message(ready_info()))
    limits = Limits(max_n=8, max_choices=16, trust_request_chat_template=trusts_templates)
    return PlanContext(fleet, limits, UnknownFields(), b"secret", parsers)


def response_store(
    *, max_responses: int = 100, max_bytes: int = 1 << 20, now: Callable[[], float] = lambda: 0.0
) -> ResponseStore:
    """An empty store; what it keeps is found for 60 s."""
    return ResponseStore(max_responses=max_responses, max_bytes=max_bytes, ttl_s=60.0, clock=now)


def named_events(written: bytes, *, are_numbered: bool = True) -> list[Body]:
    """The data of named events; each is named as its data is typed.

    Args:
        written: The stream.
        are_numbered: Whether their numbers, from 0, must be in order.
    """
    blocks = written.decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    if are_numbered:
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


class Desk:
    """Answers requests by a script.

    Attributes:
        script: For the requests to come.
        requests: What a tokenizer would have been asked, in order.
        vocabulary: The fake tokenizer's tokens.
        store: Responses that are kept.
    """

    def __init__(self) -> None:
        self.script = Script()
        self.requests: list[tokenizer_pb2.GenerateRequest] = []
        self.vocabulary = Vocabulary()
        self.context = planning()
        self.store = response_store()

    def chat(self, **fields: Any) -> Body:
        """The whole reply to a chat."""
        return self._whole(self._plan_chat(fields))

    def chat_events(self, **fields: Any) -> list[Any]:
        """The data of each event of a streamed chat; "[DONE]" as it stands."""
        return self._events(self._plan_chat(fields | {"stream": True}))

    def complete(self, prompt: Any = "one two three", **fields: Any) -> Body:
        """The whole reply to a completion."""
        return self._whole(self._plan_completion(fields | {"prompt": prompt}))

    def complete_events(self, prompt: Any = "one two three", **fields: Any) -> list[Any]:
        """The data of each event of a streamed completion."""
        return self._events(self._plan_completion(fields | {"prompt": prompt, "stream": True}))

    def respond(self, given: Any = "Hi", *, tenant: str = "", **fields: Any) -> Body:
        """The whole response."""
        return self._whole(self.plan_response(given, tenant=tenant, **fields).plan)

    def response_events(self, given: Any = "Hi", *, tenant: str = "", **fields: Any) -> list[Body]:
        """The data of each event of a streamed response."""
        planned = self.plan_response(given, tenant=tenant, **fields, stream=True)
        written = self._written(planned.plan)
        return named_events(written)

    def plan_response(self, given: Any = "Hi", *, tenant: str = "", **fields: Any) -> ResponsePlan:
        """The plan of a response."""
        body = parse_object(orjson.dumps({"model": MODEL, "input": given} | fields))
        return plan_response(
            body, Caller(tenant), self.context, store=self.store, clock=lambda: NOW
        )

    def message(self, **fields: Any) -> Body:
        """The whole message."""
        return self._whole(self._plan_message(fields))

    def message_events(self, **fields: Any) -> list[Body]:
        """The data of each event of a streamed message."""
        written = self._written(self._plan_message(fields | {"stream": True}))
        return named_events(written, are_numbered=False)

    def _plan_message(self, fields: Body) -> Plan:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
        return self._plan(plan_message, body | fields)

    def _plan_chat(self, fields: Body) -> Plan:
        return self._plan(plan_chat, {"messages": [{"role": "user", "content": "Hi"}]} | fields)

    def _plan_completion(self, fields: Body) -> Plan:
        return self._plan(plan_completion, fields)

    def _plan(self, plan: Callable[..., Plan], fields: Body) -> Plan:
        body = parse_object(orjson.dumps({"model": MODEL} | fields))
        made: Plan = plan(body, Caller(), self.context, now=NOW)
        assert made.is_stream is bool(fields.get("stream"))
        return made

    def _whole(self, plan: Plan) -> Body:
        for prompt_index, update in self.updates(plan):
            plan.reply.absorb(prompt_index, update)
        reply: Body = orjson.loads(orjson.dumps(plan.reply.whole()))
        return reply

    def _events(self, plan: Plan) -> list[Any]:
        blocks = self._written(plan).decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        found = [block.removeprefix("data: ") for block in blocks]
        return [data if data == "[DONE]" else orjson.loads(data) for data in found]

    def _written(self, plan: Plan) -> bytes:
        written = b"".join(plan.reply.events(i, update) for i, update in self.updates(plan))
        return written + plan.reply.last_events()

    def updates(self, plan: Plan) -> Iterator[tuple[int, Update]]:
        """Updates of all prompts in turn, as they would come from several streams."""
        performances = []
        for index, request in enumerate(plan.requests):
            message = request_to_message(request, attempt=0)
            message = tokenizer_pb2.GenerateRequest.FromString(message.SerializeToString())
            self.requests.append(message)
            performance = Performance(self.vocabulary, message, self.script)
            ids = list(performance.admission().prompt_ids)
            plan.reply.set_prompt(
                index,
                text=self.vocabulary.decode(ids),
                first_token_text=self.vocabulary.decode(ids[:1]),
            )
            performances.append([performance.admission(), *performance.deltas()])
        for turn in range(max(map(len, performances))):
            for index, deltas in enumerate(performances):
                if turn < len(deltas):
                    yield index, _over_the_wire(deltas[turn])


def _over_the_wire(delta: tokenizer_pb2.TextDelta) -> Update:
    return update_from_message(tokenizer_pb2.TextDelta.FromString(delta.SerializeToString()))
