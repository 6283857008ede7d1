"""Fields that are known and refused, and those that nobody knows.

Every field of OpenAI's or vLLM's API either works (it is in ``schema.py``) or is refused here by
name. What neither of them knows is accepted, and logged once per name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidRequest
from services.common.telemetry import get_logger

MAX_LOGGED_NAMES = 256
MAX_NAME_LENGTH = 64

log = get_logger(__name__)

# Field → values that mean the same as not giving it. ``null`` always does.
REFUSED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "watermarking": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "session_id": (),
    "routed_experts_prompt_start": (),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    "prompt_embeds": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (),
    # vLLM's earlier spelling of constraints: ignoring these would be worse than refusing them
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
}
_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json_object": "use structured_outputs.json_object",
}


class UnknownFields:
    """Remembers which unknown names were logged; bounded, because clients choose the names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(
        self,
        extra: Mapping[str, Any] | None,
        *,
        also_refused: Mapping[str, tuple[object, ...]],
        where: str = "",
        instead: Mapping[str, str] = _INSTEAD,
    ) -> None:
        """Refuse known fields that are not offered, log the unknown ones.

        Args:
            extra: Fields that the schema does not have.
            also_refused: More fields to be refused, with their harmless values.
            where: Path of the object they are in, with a dot at its end.
            instead: Field → what does what it would do.

        Raises:
            InvalidRequest: Names the field.
        """
        for name, value in (extra or {}).items():
            harmless = REFUSED.get(name, also_refused.get(name))
            if harmless is None:
                self._log_once(where + name)
            elif value is not None and not _is_one_of(value, harmless):
                raise InvalidRequest(_refusal(where + name, instead.get(name)), param=where + name)

    def _log_once(self, name: str) -> None:
        name = name[:MAX_NAME_LENGTH]
        if name in self._logged or len(self._logged) >= MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        log.warning("unknown_request_field_ignored", field=name)


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    """Whether a value changes nothing; 1 and true are different things."""
    return any(type(value) is type(other) and value == other for other in harmless)


def _refusal(field: str, instead: str | None) -> str:
    return f"{field} is not supported here" + (f": {instead}" if instead else "")
