"""Checks of POST /v1/responses' body for what a chat does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import PlanContext
from services.gateway.openai.responses.fields import (
    INCLUDABLE,
    INSTEAD,
    REFUSED,
    REFUSED_OF_REASONING,
    REFUSED_OF_TOOLS,
)
from services.gateway.openai.responses.items import check_item_types
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.responses.tools import check_tool_types

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

JsonObject = dict[str, Any]


def checked_body(raw: JsonObject, context: PlanContext) -> ResponseRequest:
    """The body, with types and the fields checked that a chat does not have.

    Raises:
        InvalidRequest: Names the field.
    """
    check_item_types(raw.get("input"))
    check_tool_types(raw.get("tools"))
    body = validate(raw, ResponseRequest)
    fields = context.unknown_fields
    fields.check(body.model_extra, also_refused=REFUSED, instead=INSTEAD)
    if body.text is not None:
        fields.check(body.text.model_extra, also_refused={}, where="text.")
    if body.reasoning is not None:
        extra = body.reasoning.model_extra
        fields.check(extra, also_refused=REFUSED_OF_REASONING, where="reasoning.")
    for index, tool in enumerate(body.tools or ()):
        fields.check(tool.model_extra, also_refused=REFUSED_OF_TOOLS, where=f"tools[{index}].")
    _check_include(body.include or ())
    _check_metadata(body.metadata or {})
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: true", param="background")
    return body


def _check_include(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in INCLUDABLE:
            raise InvalidRequest(
                f"include[{index}] must be one of {', '.join(INCLUDABLE)}, got {name[:60]!r}",
                param=f"include[{index}]",
            )


def _check_metadata(metadata: JsonObject) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA}", param="metadata"
        )
    for name, value in metadata.items():
        is_text = isinstance(value, str) and len(value) <= MAX_METADATA_VALUE_CHARS
        if not is_text or len(name) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequest(
                f"metadata: {name[:MAX_METADATA_KEY_CHARS]!r} must be a text of at most "
                f"{MAX_METADATA_VALUE_CHARS} characters under a name of at most "
                f"{MAX_METADATA_KEY_CHARS}",
                param="metadata",
            )
