"""POST /v1/completions: the plan of a request and its reply."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams, draw_seed
from services.gateway.generation import ChoiceUpdate, Finish, Update
from services.gateway.openai.logprobs import (
    CompletionLogprobs,
    TokenNames,
    join_columns,
    prompt_logprobs,
)
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import (
    Caller,
    Plan,
    PlanContext,
    check_common,
    generation_request,
    num_choices,
    spellings,
    stream_usage,
)
from services.gateway.openai.prompts import parse_prompts
from services.gateway.openai.reply import (
    ChoiceText,
    ChunkFrame,
    PromptFacts,
    ReplyHead,
    StreamUsage,
    count,
    ending,
    is_silent,
)
from services.gateway.openai.sampling import check_num_logprobs, sampling_params
from services.gateway.openai.schema import CompletionRequest
from services.gateway.openai.usage import UsageTally
from services.gateway.request_id import new_request_id

DEFAULT_MAX_TOKENS = 16

_REFUSED: dict[str, tuple[object, ...]] = {
    "max_completion_tokens": (),
    "best_of": (),
    "chat_template": (),
    "tools": ([],),
    "tool_choice": ("none",),
}


def plan_completion(raw: dict[str, Any], caller: Caller, context: PlanContext, *, now: int) -> Plan:
    """Check a completions request and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        now: Unix seconds.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = validate(raw, CompletionRequest)
    info = check_common(body, context, also_refused=_REFUSED | {"best_of": (body.n or 1,)})
    max_choices = context.limits.max_choices
    prompts = parse_prompts(body.prompt, vocab_size=info.vocab_size, max_prompts=max_choices)
    n = num_choices(body, context.limits)
    _check_num_choices(len(prompts), n, max_choices)
    options = _options(body)
    request_id = new_request_id("cmpl")
    make = partial(
        generation_request,
        body,
        model=info.model,
        sampling=_sampling(body, options, info.vocab_size),
        caller=caller,
        context=context,
        add_special_tokens=body.add_special_tokens is not False,
    )
    requests = (
        (make(prompts[0], request_id=request_id),)
        if len(prompts) == 1
        else tuple(make(p, request_id=f"{request_id}-{i}") for i, p in enumerate(prompts))
    )
    head = ReplyHead(request_id, now, info.model)
    reply = CompletionReply(head, num_prompts=len(prompts), n=n, options=options)
    return Plan(requests, reply, bool(body.stream), spellings(body))


def _check_num_choices(num_prompts: int, n: int, limit: int) -> None:
    if num_prompts * n > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n {n} make {num_prompts * n} choices; "
            f"at most {limit} are allowed",
            param="prompt" if num_prompts > n else "n",
        )


def _sampling(
    body: CompletionRequest, options: CompletionOptions, vocab_size: int
) -> SamplingParams:
    return sampling_params(
        body,
        max_tokens=options.num_asked,
        logprobs=None if options.drops_output else body.logprobs,
        prompt_logprobs=_wanted_prompt_logprobs(body),
        drawn_seed=draw_seed(),
        vocab_size=vocab_size,
    )


def _wanted_prompt_logprobs(body: CompletionRequest) -> int | None:
    check_num_logprobs("logprobs", body.logprobs)
    check_num_logprobs("prompt_logprobs", body.prompt_logprobs)
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


class CompletionOptions:
    """What a completions reply has to show."""

    def __init__(self, body: CompletionRequest, *, max_tokens: int) -> None:
        """
        Args:
            body: The request.
            max_tokens: 0 = only the prompt is wanted.
        """
        self.echoes = bool(body.echo)
        self.drops_output = max_tokens == 0
        # Log-probabilities of a prompt come with its continuation: one token is run and not shown.
        self.num_asked = max_tokens or 1
        self.num_top = body.logprobs
        self.usage: StreamUsage = stream_usage(body)
        self.returns_token_ids = bool(body.return_token_ids)
        self.as_token_ids = bool(body.return_tokens_as_token_ids)
        self.num_top_of_prompt = body.prompt_logprobs


def _options(body: CompletionRequest) -> CompletionOptions:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 0 or (max_tokens == 0 and not body.echo):
        raise InvalidRequest(
            f"max_tokens must be at least 1 (0 only with echo), got {max_tokens}",
            param="max_tokens",
        )
    return CompletionOptions(body, max_tokens=max_tokens)


class CompletionReply:
    """Makes the reply of one completions request; choice index = prompt * n + choice."""

    def __init__(
        self, head: ReplyHead, *, num_prompts: int, n: int, options: CompletionOptions
    ) -> None:
        """
        Args:
            head: Id, time and model.
            num_prompts: Number of prompts.
            n: Choices per prompt.
            options: What is to be shown.
        """
        self.tally = UsageTally()
        self.needs_prompt_text = options.echoes
        self._head = head
        self._n = n
        self._options = options
        self._frame = ChunkFrame(head, kind="text_completion", usage=options.usage)
        self._prompts = [PromptFacts() for _ in range(num_prompts)]
        self._choices = [
            _TextChoice(index, options=options, prompt=self._prompts[index // n])
            for index in range(num_prompts * n)
        ]

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Give the text of a prompt, to be echoed."""
        self._prompts[prompt_index].text = text
        self._prompts[prompt_index].first_token_text = first_token_text

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update."""
        self._count(prompt_index, update)
        return b"".join(
            [
                self._frame.chunk(body, tally=self.tally)
                for choice in update.choices
                for body in self._choice(prompt_index, choice).chunks(choice)
            ]
        )

    def last_events(self) -> bytes:
        """Usage, if asked for, and [DONE]."""
        return self._frame.end(self.tally)

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update."""
        self._count(prompt_index, update)
        for choice in update.choices:
            self._choice(prompt_index, choice).absorb(choice)

    def whole(self) -> dict[str, Any]:
        """The ``text_completion`` object."""
        return self._head.as_json("text_completion") | {
            "choices": [choice.whole() for choice in self._choices],
            "usage": self.tally.as_json(),
        }

    def _choice(self, prompt_index: int, update: ChoiceUpdate) -> _TextChoice:
        return self._choices[prompt_index * self._n + update.index]

    def _count(self, prompt_index: int, update: Update) -> None:
        self._prompts[prompt_index].take(update)
        count(self.tally, prompt_index, update)
        if self._options.drops_output:
            self.tally.forget_output()


class _TextChoice:
    """One choice: its JSON, chunk by chunk or whole."""

    def __init__(self, index: int, *, options: CompletionOptions, prompt: PromptFacts) -> None:
        self._index = index
        self._options = options
        self._prompt = prompt
        self._owes_echo = options.echoes
        self._gathered = ChoiceText()
        self._columns: list[dict[str, Any]] = []
        self._start = b'{"index":%d,"text":' % index
        names = TokenNames(as_token_ids=options.as_token_ids)
        self._logprobs = CompletionLogprobs(names, num_top=options.num_top or 0)

    def chunks(self, update: ChoiceUpdate) -> list[bytes]:
        """The choice of each chunk that an update makes: the echo, new text, the end."""
        found = []
        if self._owes_echo:
            columns = self._echo_columns()
            found.append(self._chunk(self._prompt.text, columns, self._prompt_ids()))
        if not self._options.drops_output and self._shows(update):
            found.append(self._chunk(update.text, self._rows(update), list(update.token_ids)))
        if update.finish is not None:
            found.append(self._end(update.finish))
        return found

    def _shows(self, update: ChoiceUpdate) -> bool:
        has_ids = self._options.returns_token_ids and len(update.token_ids) > 0
        return bool(update.text or update.logprobs or has_ids or is_silent(update))

    def _chunk(self, text: str, columns: dict[str, Any] | None, ids: list[int]) -> bytes:
        shown_ids = b',"token_ids":' + orjson.dumps(ids) if self._options.returns_token_ids else b""
        return b"".join(
            (
                self._start,
                orjson.dumps(text),
                b',"logprobs":',
                orjson.dumps(columns),
                b',"finish_reason":null',
                shown_ids,
                b"}",
            )
        )

    def _end(self, finish: Finish) -> bytes:
        fields = orjson.dumps(ending(self._shown(finish)))[1:]
        return self._start + b'"","logprobs":null,' + fields

    def _shown(self, finish: Finish) -> Finish:
        """The end as it is told: no token was asked for, so the length was reached."""
        return Finish("length") if self._options.drops_output else finish

    def _rows(self, update: ChoiceUpdate) -> dict[str, Any] | None:
        if self._options.num_top is None:
            return None
        return self._logprobs.rows(update.logprobs, is_end=update.finish is not None)

    def _echo_columns(self) -> dict[str, Any] | None:
        """Log-probabilities of the prompt; they have all come before a choice's first update."""
        self._owes_echo = False
        if self._options.num_top is None:
            return None
        prompt = self._prompt
        first = self._logprobs.first_of_prompt(prompt.ids[0], prompt.first_token_bytes())
        return join_columns([first, self._logprobs.rows(prompt.logprobs)])

    def _prompt_ids(self) -> list[int]:
        return list(self._prompt.ids)

    def absorb(self, update: ChoiceUpdate) -> None:
        """Keep an update for ``whole``."""
        if self._owes_echo:
            self._gathered.parts.append(self._prompt.text)
            self._keep(self._echo_columns())
        if self._options.drops_output:
            self._gathered.finish = update.finish and self._shown(update.finish)
            return
        self._gathered.add(update)
        self._keep(self._rows(update))

    def _keep(self, columns: dict[str, Any] | None) -> None:
        if columns is not None:
            self._columns.append(columns)

    def whole(self) -> dict[str, Any]:
        """The choice of a whole reply."""
        columns = None if self._options.num_top is None else join_columns(self._columns)
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._gathered.text,
            "logprobs": columns,
        }
        choice |= self._gathered.ending
        num_top = self._options.num_top_of_prompt
        if num_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._prompt.logprobs, num_top=num_top, as_token_ids=self._options.as_token_ids
            )
        if self._options.returns_token_ids:
            choice["token_ids"] = self._gathered.token_ids
            choice["prompt_token_ids"] = self._prompt_ids()
        return choice
