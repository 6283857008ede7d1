"""Whether a chat's choices begin with a thought, and constraints that start after it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.sampling import Constraint, ConstraintKind
from services.gateway.lark import quoted, rule_of
from services.gateway.openai.schema import ChatCompletionRequest
from services.gateway.reasoning.base import ThoughtFormat, ThoughtParser

_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ThoughtUse:
    """How the thoughts of a request come about.

    Attributes:
        marks: How they are marked.
        is_open: Whether a choice begins inside its thought.
        is_wanted: Whether the request asks for one that the model has to open itself.
    """

    marks: ThoughtFormat
    is_open: bool
    is_wanted: bool

    def parser(self) -> ThoughtParser:
        """One for the text of one choice."""
        return ThoughtParser(self.marks, is_open=self.is_open)

    def before(self, constraint: Constraint | None) -> Constraint | None:
        """The constraint of an answer that a thought stands before.

        If the model is free to think or not, the constraint holds from the first token, and there
        is no thought: a model that does not think would be led into one. The marks must be tokens
        of the model, else its worker refuses the constraint; it may spell them out all the same.
        """
        if constraint is None or not (self.is_open or self.is_wanted):
            return constraint
        opening = "" if self.is_open else f"({_token_or_text(self.marks.opening)}) "
        rules = [
            f"start: {opening}thought space answer",
            *_thought_rules(self.marks.closing),
            "space: /[ \\n]{0,4}/",
            f"answer: {rule_of(constraint)}",
        ]
        return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def thought_use(
    body: ChatCompletionRequest, known_format: ThoughtFormat | None
) -> ThoughtUse | None:
    """How the thoughts of a request come about; ``None`` = they are not looked for.

    Args:
        body: Types checked.
        known_format: How the model marks them, if that is known.
    """
    if known_format is None:
        return None
    kwargs = body.chat_template_kwargs or {}
    is_off = any(kwargs.get(name) is False for name in _SWITCHES)
    opens_turn = body.add_generation_prompt is not False and not body.continue_final_message
    is_open = known_format.is_opened_by_prompt and opens_turn and not is_off
    is_wanted = any(kwargs.get(name) is True for name in _SWITCHES)
    return ThoughtUse(known_format, is_open, is_wanted)


def _token_or_text(mark: str) -> str:
    """A mark, as a token of the model or letter by letter."""
    return f"{mark} | {quoted(mark)}"


def _thought_rules(closing: str) -> list[str]:
    """Any text up to the first closing mark, as a token of the model or letter by letter."""
    spelled = re.escape(closing).replace("/", r"\/")
    return [
        f"thought: TEXT {closing} | spelled",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{spelled}(.|\n)*/",
        f"spelled[suffix={quoted(closing)}]: /(.|\\n)*/",
    ]
