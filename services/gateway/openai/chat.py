"""POST /v1/chat/completions: the plan of a request and its reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.gateway.generation import ChatPrompt, ChoiceUpdate, Finish, Update
from services.gateway.openai.logprobs import TokenNames, chat_entries, prompt_logprobs
from services.gateway.openai.messages import chat_prompt
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import (
    INT32_LIMIT,
    Caller,
    Plan,
    PlanContext,
    check_common,
    draw_seed,
    generation_request,
    spellings,
    stream_usage,
)
from services.gateway.openai.reply import (
    ChoiceText,
    ChunkFrame,
    PromptFacts,
    ReplyHead,
    StreamUsage,
    count,
    ending,
)
from services.gateway.openai.sampling import check_num_logprobs, sampling_params
from services.gateway.openai.schema import ChatCompletionRequest
from services.gateway.openai.usage import UsageTally
from services.gateway.request_id import new_request_id

_REFUSED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True, False),
}
_ROLE = b'{"role":"assistant","content":""}'


def plan_chat(raw: dict[str, Any], caller: Caller, context: PlanContext, *, now: int) -> Plan:
    """Check a chat request and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        now: Unix seconds.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = validate(raw, ChatCompletionRequest)
    info = check_common(body, context, also_refused=_REFUSED)
    request = generation_request(
        body,
        _prompt(body, raw, context),
        request_id=new_request_id("chatcmpl"),
        model=info.model,
        sampling=_sampling(body, info.vocab_size),
        caller=caller,
        context=context,
    )
    head = ReplyHead(request.request_id, now, info.model)
    reply = ChatReply(head, _options(body, n=request.n))
    return Plan((request,), reply, bool(body.stream), _spellings(body))


def _sampling(body: ChatCompletionRequest, vocab_size: int) -> SamplingParams:
    check_num_logprobs("prompt_logprobs", body.prompt_logprobs)
    return sampling_params(
        body,
        max_tokens=_max_tokens(body),
        logprobs=_num_top(body),
        prompt_logprobs=body.prompt_logprobs,
        drawn_seed=draw_seed(),
        vocab_size=vocab_size,
    )


def _options(body: ChatCompletionRequest, *, n: int) -> ChatOptions:
    return ChatOptions(
        n=n,
        usage=stream_usage(body),
        num_top=_num_top(body),
        num_top_of_prompt=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
    )


def _prompt(body: ChatCompletionRequest, raw: dict[str, Any], context: PlanContext) -> ChatPrompt:
    _check_tools(body)
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest('modalities: only ["text"] is supported', param="modalities")
    return chat_prompt(body, raw, trusts_templates=context.limits.trust_request_chat_template)


def _check_tools(body: ChatCompletionRequest) -> None:
    if body.tool_choice in (None, "none") and (not body.tools or body.tool_choice == "none"):
        return
    if body.tool_choice == "auto" and not body.tools:
        return
    param = "tools" if body.tools and body.tool_choice is None else "tool_choice"
    raise InvalidRequest(f"{param} is not supported here yet", param=param)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    wanted = body.max_completion_tokens
    if wanted is None:
        return body.max_tokens
    if not 1 <= wanted < INT32_LIMIT:
        raise InvalidRequest(
            f"max_completion_tokens must be in [1, {INT32_LIMIT - 1}], got {wanted}",
            param="max_completion_tokens",
        )
    return wanted


def _spellings(body: ChatCompletionRequest) -> dict[str, str]:
    is_new = body.max_completion_tokens is not None
    return spellings(body, max_tokens="max_completion_tokens" if is_new else "max_tokens")


def _num_top(body: ChatCompletionRequest) -> int | None:
    check_num_logprobs("top_logprobs", body.top_logprobs)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat's reply has to show.

    Attributes:
        n: Number of choices.
        usage: When a stream tells usage.
        num_top: Alternatives per token; ``None`` = no log-probabilities.
        num_top_of_prompt: The same for the prompt (``prompt_logprobs``).
        returns_token_ids: Whether choices carry ``token_ids``.
        as_token_ids: Whether log-probabilities name tokens by id.
    """

    n: int
    usage: StreamUsage
    num_top: int | None
    num_top_of_prompt: int | None
    returns_token_ids: bool
    as_token_ids: bool


class ChatReply:
    """Makes the reply of one chat request."""

    needs_prompt_text = False

    def __init__(self, head: ReplyHead, options: ChatOptions) -> None:
        """
        Args:
            head: Id, time and model.
            options: What is to be shown.
        """
        self.tally = UsageTally()
        self._head = head
        self._options = options
        self._frame = ChunkFrame(head, kind="chat.completion.chunk", usage=options.usage)
        self._choices = [_ChatChoice(index, options) for index in range(options.n)]
        self._prompt = PromptFacts()

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Never needed: a chat is not echoed."""

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update."""
        self._prompt.take(update)
        count(self.tally, prompt_index, update)
        return b"".join([self._choice_events(choice) for choice in update.choices])

    def _choice_events(self, update: ChoiceUpdate) -> bytes:
        choice = self._choices[update.index]
        pieces = [self._role_event(choice)] if not choice.has_started else []
        has_ids = self._options.returns_token_ids and len(update.token_ids) > 0
        if update.text or update.logprobs or has_ids:
            body = choice.delta(update, has_ids=has_ids)
            pieces.append(self._frame.chunk(body, tally=self.tally))
        if update.finish is not None:
            pieces.append(self._frame.chunk(choice.end(update.finish), tally=self.tally))
        return b"".join(pieces)

    def _role_event(self, choice: _ChatChoice) -> bytes:
        choice.has_started = True
        ids = list(self._prompt.ids) if self._options.returns_token_ids else None
        extra = b',"prompt_token_ids":' + orjson.dumps(ids) if ids is not None else b""
        return self._frame.chunk(choice.opening, tally=self.tally, extra=extra)

    def last_events(self) -> bytes:
        """Usage, if asked for, and [DONE]."""
        return self._frame.end(self.tally)

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update."""
        self._prompt.take(update)
        count(self.tally, prompt_index, update)
        for choice in update.choices:
            self._choices[choice.index].absorb(choice)

    def whole(self) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        reply = self._head.as_json("chat.completion") | {
            "choices": [
                choice.whole(has_ids=self._options.returns_token_ids) for choice in self._choices
            ],
            "usage": self.tally.as_json(),
        }
        if self._options.num_top_of_prompt is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                self._prompt.logprobs,
                num_top=self._options.num_top_of_prompt,
                as_token_ids=self._options.as_token_ids,
            )
        if self._options.returns_token_ids:
            reply["prompt_token_ids"] = list(self._prompt.ids)
        return reply


class _ChatChoice:
    """One choice: its JSON, chunk by chunk or whole."""

    def __init__(self, index: int, options: ChatOptions) -> None:
        self.has_started = False
        self._index = index
        self._num_top = options.num_top
        self._names = TokenNames(as_token_ids=options.as_token_ids)
        self._entries: list[dict[str, Any]] = []
        self._gathered = ChoiceText()
        self._start = b'{"index":%d,"delta":' % index
        self.opening = self._start + _ROLE + b',"logprobs":null,"finish_reason":null}'

    def delta(self, update: ChoiceUpdate, *, has_ids: bool) -> bytes:
        """The choice of a chunk with new text."""
        ids = b',"token_ids":' + orjson.dumps(list(update.token_ids)) if has_ids else b""
        return b"".join(
            (
                self._start,
                b'{"content":',
                orjson.dumps(update.text),
                b'},"logprobs":',
                self._logprobs(update),
                b',"finish_reason":null',
                ids,
                b"}",
            )
        )

    def end(self, finish: Finish) -> bytes:
        """The choice of the chunk that ends it."""
        fields = orjson.dumps(ending(finish))[1:]
        return self._start + b'{},"logprobs":null,' + fields

    def _logprobs(self, update: ChoiceUpdate) -> bytes:
        if self._num_top is None:
            return b"null"
        return orjson.dumps({"content": self._named(update), "refusal": None})

    def _named(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        return chat_entries(
            update.logprobs,
            self._names,
            num_top=self._num_top or 0,
            is_end=update.finish is not None,
        )

    def absorb(self, update: ChoiceUpdate) -> None:
        """Keep an update for ``whole``."""
        self._gathered.add(update)
        if self._num_top is not None:
            self._entries += self._named(update)

    def whole(self, *, has_ids: bool) -> dict[str, Any]:
        """The choice of a whole reply."""
        logprobs = None if self._num_top is None else {"content": self._entries, "refusal": None}
        choice: dict[str, Any] = {
            "index": self._index,
            "message": {"role": "assistant", "content": self._gathered.text, "refusal": None},
            "logprobs": logprobs,
        }
        choice |= self._gathered.ending
        if has_ids:
            choice["token_ids"] = self._gathered.token_ids
        return choice
