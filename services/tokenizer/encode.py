"""The model's tokenizer file: text to token ids and back.

Encoding a long text takes milliseconds, so it is done in threads, by the one call of the library
that lets go of the interpreter lock meanwhile (a batch without offsets; a single ``encode`` holds
it: a megabyte would stop the whole process for more than a second).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from services.common.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.common.fingerprint import TOKENIZER_FILE, eos_token_ids, read_json, vocab_size
from services.tokenizer.detokenize import Detokenizer, new_detokenizer
from services.tokenizer.token_bytes import TokenBytes, token_bytes

INLINE_CHARS = 1_000
"""Texts up to here are encoded on the spot (0.2 ms at most): a hop to a thread costs as much."""

R = TypeVar("R")


class Encoder:
    """A tokenizer with its threads; ``close`` it."""

    def __init__(self, model_dir: Path, *, num_threads: int) -> None:
        """
        Args:
            model_dir: Holds ``tokenizer.json`` and ``config.json``.
            num_threads: Threads for long texts and for templates.

        Raises:
            ConfigError: A file is missing or cannot be read.
        """
        self._tokenizer = _load(model_dir / TOKENIZER_FILE)
        self.vocab_size = vocab_size(read_json(model_dir / "config.json"))
        self.eos_token_ids = frozenset(eos_token_ids(model_dir))
        self.token_bytes = token_bytes(self._tokenizer, vocab_size=self.vocab_size)
        self._longest_token = _longest_token(self._tokenizer, self.token_bytes)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, *, add_special_tokens: bool, param: str, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: Whether the tokenizer's own post-processor adds them (BOS, say).
            param: The request's field, for the message.
            max_tokens: A text that is sure to have more is refused before the work is done:
                megabytes take seconds, of everybody's time.

        Raises:
            InvalidRequest: The text holds half of a surrogate pair, so is not Unicode text.
            ContextLengthExceeded: It has more than ``max_tokens``, by its length alone.
        """
        if max_tokens is not None and self._longest_token:
            least = len(text) // self._longest_token
            if least > max_tokens:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {max_tokens} tokens, but {param} has "
                    f"{len(text)} characters, which are at least {least} tokens; shorten it",
                    param=param,
                )
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens, param=param)
        return await self.in_thread(
            lambda: self.encode_now(text, add_special_tokens=add_special_tokens, param=param)
        )

    def encode_now(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """As ``encode``, in the caller's thread."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} is not valid Unicode: {error.reason}", param=param
            ) from None
        if len(text) <= INLINE_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Run something in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def require_known(self, token_ids: Sequence[int], *, param: str) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InvalidRequest: Names the field and the id.
        """
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise InvalidRequest(
                f"{param}: token id {highest} is not in 0..{self.vocab_size - 1}", param=param
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own names of tokens."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for output that follows ``prompt_ids``."""
        return new_detokenizer(
            self._tokenizer,
            self.token_bytes,
            prompt_ids=prompt_ids,
            skip_special_tokens=skip_special_tokens,
        )


def _longest_token(tokenizer: Tokenizer, table: TokenBytes) -> int:
    """Most characters that one token can stand for; 0 = nobody knows.

    A normalizer may shorten a text, and some special tokens take all the space around them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    takes_space = any(token.lstrip or token.rstrip for token in added)
    if tokenizer.normalizer is not None or takes_space or not table.is_exact:
        return 0
    return max(len(data) for data in table.shown)


def _load(path: Path) -> Tokenizer:
    if not path.exists():
        raise ConfigError(f"{path} is missing: the model has no fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
