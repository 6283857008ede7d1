"""``tools`` and ``tool_choice``: whether calls are enforced, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.sampling import Constraint
from services.gateway.enforced_calls import (
    arguments_schema,
    constrain_to_calls,
    constrain_to_calls_or,
    constrain_to_one,
    read_calls,
    reads_arguments_of,
)
from services.gateway.openai.schema import ChatCompletionRequest, Tool
from services.gateway.tool_calls.base import (
    CallFormat,
    CallFrame,
    CallParser,
    JsonObject,
    ReadCalls,
    Tools,
)

Offered = Mapping[str, Tool]
"""Where a tool stands in the request → the tool."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the calls of a request come about.

    Attributes:
        read: How they are written.
        tools: What may be called.
        is_parallel: Whether there may be several.
        constraint: What enforces them; ``None`` = the model may call or answer.
        is_named: Whether the request has named the function: such a choice ends with "stop".
        has_special_tokens: Whether special tokens mark them.
        frame: What stands around calls that stand beside a constraint on the answer.
    """

    read: ReadCalls
    tools: Tools
    is_parallel: bool = True
    constraint: Constraint | None = None
    is_named: bool = False
    has_special_tokens: bool = False
    frame: CallFrame | None = None

    def beside(self, answer: Constraint | None) -> Constraint | None:
        """What holds for the whole text, where ``answer`` holds for what is no call."""
        if self.constraint is not None:
            return self.constraint  # there is no content that another one could be about
        if answer is None or self.frame is None:
            return answer
        return constrain_to_calls_or(answer, self.tools, self.frame, is_parallel=self.is_parallel)

    def parser(self) -> CallParser:
        """One for the text of one choice."""
        return CallParser(self.read, self.tools, is_parallel=self.is_parallel)


def tool_use(body: ChatCompletionRequest, known_format: CallFormat | None) -> ToolUse | None:
    """How the calls of a request come about; ``None`` = there are none.

    Args:
        body: Types checked.
        known_format: How the model writes calls, if that is known.

    Raises:
        InvalidRequest: Names the field.
    """
    tools = {f"tools[{index}]": tool for index, tool in enumerate(body.tools or [])}
    choice = body.tool_choice
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    if choice in (None, "auto"):
        return _chosen_by_model(body, tools, known_format)
    if not tools:
        raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
    match choice:
        case "required":
            return _required(body, tools)
        case {"type": "function"}:
            return _one(_only([_name_of(choice)], tools))
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_, *_] as named}}:
            allowed = _only([_name_of(tool) for tool in named], tools)
            if mode == "auto":
                return _chosen_by_model(body, allowed, known_format)
            if mode == "required":
                return _required(body, allowed)
    raise _unclear(choice)


def _name_of(reference: object) -> str:
    match reference:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _unclear(reference)


def _unclear(choice: object) -> InvalidRequest:
    return InvalidRequest(
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
        f'"tools": [{{"type": "function", "function": {{"name": ...}}}}]}}}}, got {_shown(choice)}',
        param="tool_choice",
    )


def _shown(choice: object) -> str:
    return repr(choice)[:60]


def _only(names: Sequence[str], tools: Offered) -> Offered:
    """Those of the tools that are named; the prompt shows all of them nevertheless."""
    known = {tool.function.name for tool in tools.values()}
    for name in names:
        if name not in known:
            raise InvalidRequest(
                f"tool_choice names {name[:60]!r}, which is not among the tools",
                param="tool_choice",
            )
    return {where: tool for where, tool in tools.items() if tool.function.name in names}


def _chosen_by_model(
    body: ChatCompletionRequest, tools: Offered, known_format: CallFormat | None
) -> ToolUse:
    if known_format is None:
        name = "tools" if body.tool_choice is None else "tool_choice"
        raise InvalidRequest(
            f"{name}: how this model writes tool calls is not known here "
            "(--tool-call-parser); tool_choice may be required, or name a function",
            param=name,
        )
    frame = known_format.frame if _is_constrained(body) else None
    if _is_constrained(body) and frame is None:
        raise _not_beside_calls(body)
    schemas = {
        tool.function.name: _schema(tool, where) if frame else tool.function.parameters or {}
        for where, tool in tools.items()
    }
    return ToolUse(
        known_format.read,
        schemas,
        is_parallel=body.parallel_tool_calls is not False,
        has_special_tokens=known_format.has_special_tokens,
        frame=frame,
    )


def _is_constrained(body: ChatCompletionRequest) -> bool:
    form = body.response_format
    return body.structured_outputs is not None or (form is not None and form.type != "text")


def _not_beside_calls(body: ChatCompletionRequest) -> InvalidRequest:
    """A constraint on the answer alone would keep the model from ever calling."""
    param = "response_format" if body.structured_outputs is None else "structured_outputs"
    return InvalidRequest(
        f"{param} is not supported together with tools that the model is free to call, as there is "
        "no grammar for the way in which it writes calls: set tool_choice to none or required",
        param=param,
    )


def _required(body: ChatCompletionRequest, tools: Offered) -> ToolUse:
    # Several only if asked for: a model that knows no tools would go on calling.
    is_parallel = bool(body.parallel_tool_calls)
    schemas = {tool.function.name: _schema(tool, where) for where, tool in tools.items()}
    constraint = constrain_to_calls(schemas, is_parallel=is_parallel)
    return ToolUse(read_calls, schemas, is_parallel=is_parallel, constraint=constraint)


def _one(tools: Offered) -> ToolUse:
    (where, tool), *_ = tools.items()
    name, schema = tool.function.name, _schema(tool, where)
    return ToolUse(
        reads_arguments_of(name),
        {name: schema},
        constraint=constrain_to_one(schema),
        is_named=True,
    )


def _schema(tool: Tool, where: str) -> JsonObject:
    return arguments_schema(tool.function.parameters, f"{where}.function.parameters")
