"""The prompts of a completions or embeddings request: text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.gateway.generation import IdsPrompt, TextPrompt

MAX_TOKEN_ID = 2**32 - 1
MAX_IDS = 1 << 20


def parse_prompts(
    prompt: object, *, vocab_size: int, max_prompts: int, name: str = "prompt"
) -> list[TextPrompt | IdsPrompt]:
    """The prompts of a request.

    Args:
        prompt: As it came.
        vocab_size: Of the model; 0 = not known.
        max_prompts: Most prompts of a request.
        name: The field that they came in.

    Raises:
        InvalidRequest: Of another type, empty, too many, or with ids that the model does not have.
    """
    if isinstance(prompt, str):
        return [_text(prompt, name)]
    if not isinstance(prompt, list):
        raise InvalidRequest(
            f"{name} must be text, a list of token ids, or a list of either", param=name
        )
    if not prompt:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    if type(prompt[0]) is int:
        return [token_ids(prompt, name, vocab_size=vocab_size)]
    if len(prompt) > max_prompts:
        raise InvalidRequest(
            f"{name} has {len(prompt)} entries; at most {max_prompts} are allowed", param=name
        )
    return [_one(part, f"{name}[{index}]", vocab_size) for index, part in enumerate(prompt)]


def _one(part: object, where: str, vocab_size: int) -> TextPrompt | IdsPrompt:
    if isinstance(part, str):
        return _text(part, where)
    if isinstance(part, list):
        return token_ids(part, where, vocab_size=vocab_size)
    raise InvalidRequest(f"{where} must be text or a list of token ids", param=where)


def _text(text: str, where: str) -> TextPrompt:
    if not text:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    return TextPrompt(text)


def token_ids(ids: Sequence[object], where: str, *, vocab_size: int) -> IdsPrompt:
    """Check a list of token ids.

    Args:
        ids: As they came.
        where: The field they are in.
        vocab_size: Of the model; 0 = not known.

    Raises:
        InvalidRequest: None, too many, no integers, or ids that the model does not have.
    """
    if not ids:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    if len(ids) > MAX_IDS:
        raise InvalidRequest(f"{where} has {len(ids)} token ids; at most {MAX_IDS}", param=where)
    last = vocab_size - 1 if vocab_size else MAX_TOKEN_ID
    for index, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequest(
                f"{where}[{index}] must be a token id (an integer)", param=f"{where}[{index}]"
            )
        if not 0 <= token_id <= last:
            raise InvalidRequest(
                f"{where}[{index}]: token id {token_id} is not in the vocabulary (0..{last})",
                param=f"{where}[{index}]",
            )
    return IdsPrompt(ids)  # type: ignore[arg-type]
