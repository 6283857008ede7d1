"""Token counts of a reply: what the finishes say, and what has come so far."""

from __future__ import annotations

from typing import Any

from services.gateway.generation import Finish, Update


class UsageTally:
    """Adds up a request over its prompts and choices. A prompt counts once, whatever ``n``."""

    def __init__(self) -> None:
        self._reasoning: dict[int, int] = {}
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._output: dict[tuple[int, int], int] = {}

    def admitted(self, prompt_index: int, update: Update) -> None:
        """The first update of a prompt's generation: it says how long the prompt is."""
        self._prompt[prompt_index] = len(update.prompt_ids or ())

    def produced(self, prompt_index: int, choice_index: int, num_tokens: int) -> None:
        """A choice has ``num_tokens`` output tokens by now."""
        self._output[prompt_index, choice_index] = num_tokens

    def reasoned(self, choice_index: int, num_tokens: int) -> None:
        """A choice of a chat has ``num_tokens`` tokens of thought by now."""
        self._reasoning[choice_index] = num_tokens

    def finished(self, prompt_index: int, choice_index: int, finish: Finish) -> None:
        """A choice has ended: from here on its own figures count."""
        usage = finish.usage
        self._prompt[prompt_index] = usage.prompt_tokens
        self._output[prompt_index, choice_index] = usage.output_tokens
        if choice_index == 0:  # the others share the prompt's blocks of choice 0
            self._cached[prompt_index] = usage.cached_tokens

    def forget_output(self) -> None:
        """The output was only there to get at the prompt (``echo`` with no tokens asked for)."""
        self._output.clear()

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(self._prompt.values())
        completion = sum(self._output.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning.values())},
        }
