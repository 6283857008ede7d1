"""GET /v1/responses/{id}/input_items: the items that a response was given, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.query import int_of

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Page:
    """What part of a list is wanted.

    Attributes:
        limit: Most items.
        is_newest_first: Whether the list is turned round.
        after: Id of the item before the page; ``None`` = from the start.
    """

    limit: int
    is_newest_first: bool
    after: str | None


def page_of(query: Mapping[str, str]) -> Page:
    """The page that a query string asks for.

    Raises:
        InvalidRequest: Names the parameter.
    """
    limit = int_of(query, "limit", low=1, high=MAX_LIMIT)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:40]!r}", param="order")
    return Page(DEFAULT_LIMIT if limit is None else limit, order == "desc", query.get("after"))


def list_page(items: Sequence[Item], page: Page) -> dict[str, Any]:
    """One page of items.

    Raises:
        InvalidRequest: There is no item that it is to begin after.
    """
    ordered = list(reversed(items)) if page.is_newest_first else list(items)
    start = 0 if page.after is None else _place_of(page.after, ordered) + 1
    shown = ordered[start : start + page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + page.limit < len(ordered),
    }


def _place_of(item_id: str, items: Sequence[Item]) -> int:
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place
    raise InvalidRequest(f"after: no item has the id {item_id[:60]!r}", param="after")
