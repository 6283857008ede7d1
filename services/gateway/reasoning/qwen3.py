"""The model opens and closes its thought, or answers without one: Qwen3."""

from __future__ import annotations

from services.gateway.reasoning.base import ThoughtFormat

FORMAT = ThoughtFormat("<think>", "</think>", is_opened_by_prompt=False, models=("qwen3",))
