"""The chat template opens the thought, and the model closes it: DeepSeek-R1 and its like."""

from __future__ import annotations

from services.gateway.reasoning.base import ThoughtFormat

FORMAT = ThoughtFormat(
    "<think>", "</think>", is_opened_by_prompt=True, models=("deepseek-r1", "qwq", "thinking")
)
