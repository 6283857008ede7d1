"""Carries out one request: check it, make its prompt, choose a scheduler, stream its text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from services.common.errors import WorkerLost
from services.common.sampling import SamplingParams
from services.tokenizer import metrics
from services.tokenizer.bad_words import BadWordSpeller
from services.tokenizer.encode import Encoder
from services.tokenizer.feed import Place
from services.tokenizer.generation import Delta, Generation
from services.tokenizer.prompt import ChatPrompt, PromptReader
from services.tokenizer.request import (
    GenerateRequest,
    Resume,
    require_fit,
    require_valid,
    truncate,
    with_room,
)
from services.tokenizer.routing import Engine, Route, Router, usable
from services.tokenizer.session import Session, TokenStream
from services.tokenizer.text_output import TextOutput
from services.tokenizer.tokens import AbortReason, NewChoice, Submission


class Generator:
    """Serves requests for text, any number at once."""

    def __init__(
        self,
        *,
        encoder: Encoder,
        prompts: PromptReader,
        router: Router,
        engines: Callable[[], Sequence[Engine]],
        session_with: Callable[[str], Session | None],
        text_fp: str,
        max_choices: int,
    ) -> None:
        """
        Args:
            encoder: The model's tokenizer.
            prompts: Makes token ids of prompts.
            router: Chooses among schedulers.
            engines: Every engine there is now.
            session_with: The Session with a scheduler, by its address.
            text_fp: Our fingerprint.
            max_choices: Most choices that one request may ask for.
        """
        self._encoder = encoder
        self._bad_words = BadWordSpeller(encoder)
        self._prompts = prompts
        self._router = router
        self._engines = engines
        self._session_with = session_with
        self._text_fp = text_fp
        self._max_choices = max_choices

    async def deltas(
        self, request: GenerateRequest, *, place: Place | None = None
    ) -> AsyncGenerator[Delta]:
        """The text of a request; the first delta is the sign of its admission.

        Closing the iterator gives up whatever has not ended.

        Args:
            request: What is wanted.
            place: In a feed, by which everything after the first delta goes.

        Raises:
            SluicewayError: It is refused. After the first delta, errors are finishes of choices.
        """
        require_valid(request, vocab_size=self._encoder.vocab_size, max_choices=self._max_choices)
        started = asyncio.get_running_loop().time()
        engines = usable(self._engines(), text_fp=self._text_fp)
        prompt_ids, sampling = await self._prompt_and_sampling(request, engines)
        route = await self._router.route(
            engines, prompt_ids, cache_namespace=request.cache_namespace
        )
        elapsed = asyncio.get_running_loop().time() - started
        generation = self._generation(request, prompt_ids, sampling)
        choices = _open_choices(request, generation)
        if not choices:  # resumed, and every choice had ended
            generation.admit_finished()
            while (delta := await generation.next()) is not None:
                yield delta
            return
        submission = _submission(request, choices, prompt_ids, sampling, route, elapsed_s=elapsed)
        metrics.PROMPT_TOKENS.inc(len(prompt_ids))
        with self._router.booked(route, num_tokens=len(prompt_ids)) as booking:
            async with self._session(route).submit(submission, generation) as stream:
                with _expiry(submission.deadline_s, generation, stream):
                    while (delta := await generation.next()) is not None:
                        booking.release()
                        _count(delta)
                        if place is None:
                            yield delta
                            continue
                        place.carry(generation, on_delta=_count)
                        yield delta
                        await place.ended()
                        return

    def _session(self, route: Route) -> Session:
        session = self._session_with(route.scheduler)
        if session is None:
            raise WorkerLost(f"the scheduler at {route.scheduler} was lost")
        return session

    async def _prompt_and_sampling(
        self, request: GenerateRequest, engines: Sequence[Engine]
    ) -> tuple[Sequence[int], SamplingParams]:
        max_model_len = min(engine.max_model_len for engine in engines)
        prompt_ids = await self._prompt_ids(request, max_model_len)
        param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        if request.pools:
            require_fit(num_prompt_tokens=len(prompt_ids), max_model_len=max_model_len, param=param)
            return prompt_ids, request.sampling
        sampling = with_room(
            request.sampling,
            num_prompt_tokens=len(prompt_ids),
            max_model_len=max_model_len,
            param=param,
        )
        if request.bad_words:
            words = await self._encoder.in_thread(lambda: self._bad_words.spell(request.bad_words))
            sampling = replace(sampling, bad_words=sampling.bad_words + words)
        return prompt_ids, sampling

    async def _prompt_ids(self, request: GenerateRequest, max_model_len: int) -> Sequence[int]:
        if request.resume is not None:
            self._require_known(request.resume)
            return request.resume.prompt_ids
        keep = request.truncate_prompt_tokens
        return truncate(
            await self._prompts.token_ids(
                request.prompt, max_tokens=max_model_len if keep is None else None
            ),
            keep=keep,
            num_output_tokens=0 if request.pools else request.sampling.max_tokens or 1,
            max_model_len=max_model_len,
        )

    def _require_known(self, resume: Resume) -> None:
        for token_ids in (resume.prompt_ids, *(choice.token_ids for choice in resume.choices)):
            self._encoder.require_known(token_ids, param="resume")

    def _generation(
        self, request: GenerateRequest, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> Generation:
        outputs = {
            index: TextOutput(
                self._encoder.detokenizer(
                    prompt_ids, skip_special_tokens=request.skip_special_tokens
                ),
                stops=request.stop,
                include_stop=request.include_stop,
                min_tokens=sampling.min_tokens,
            )
            for index in _wanted_indexes(request)
        }
        return Generation(
            prompt_ids,
            outputs,
            eos_token_ids=self._encoder.eos_token_ids,
            include_stop=request.include_stop,
        )


def _wanted_indexes(request: GenerateRequest) -> list[int]:
    """The choices whose end the client does not have."""
    resumed = request.resume.choices if request.resume is not None else ()
    finished = {choice.index for choice in resumed if choice.is_finished}
    return [index for index in range(request.n) if index not in finished]


def _open_choices(request: GenerateRequest, generation: Generation) -> list[NewChoice]:
    """The choices to be generated further; what is there of them goes into ``generation``."""
    resumed = request.resume.choices if request.resume is not None else ()
    given = {choice.index: choice for choice in resumed if not choice.is_finished}
    choices = []
    for index in _wanted_indexes(request):
        choice = given.get(index)
        if choice is None:
            choices.append(NewChoice(index))
        elif generation.resume(index, choice.token_ids, num_chars=choice.num_chars):
            choices.append(NewChoice(index, choice.token_ids))
    return choices


def _submission(
    request: GenerateRequest,
    choices: Sequence[NewChoice],
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    route: Route,
    *,
    elapsed_s: float,
) -> Submission:
    deadline_s = request.deadline_s
    return Submission(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        prompt_ids=prompt_ids,
        sampling=sampling,
        choices=choices,
        trace=request.trace,
        constraint=request.constraint,
        priority=request.priority,
        tenant=request.tenant,
        cache_namespace=request.cache_namespace,
        deadline_s=None if deadline_s is None else max(deadline_s - elapsed_s, 0.0),
        prompt_logprobs_done=request.resume is not None and request.resume.prompt_logprobs_done,
        pools=request.pools,
        prediction=route.prediction,
    )


def _count(delta: Delta) -> None:
    for choice in delta.choices:
        if choice.finish is not None:
            metrics.OUTPUT_TOKENS.inc(choice.finish.scheduler.usage.output_tokens)
            metrics.STOP_STRINGS.inc(choice.finish.stop_string is not None)


@contextmanager
def _expiry(
    deadline_s: float | None, generation: Generation, stream: TokenStream
) -> Iterator[None]:
    """Give the request up when its time is over. The scheduler does so too, unless it hangs."""
    if deadline_s is None:
        yield
        return

    def expire() -> None:
        generation.expire()
        stream.abort(AbortReason.DEADLINE)

    timer = asyncio.get_running_loop().call_later(deadline_s, expire)
    try:
        yield
    finally:
        timer.cancel()
