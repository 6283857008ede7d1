"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import Any

from services.common.errors import ModelNotFound
from services.gateway.fleet import Fleet, TokenizerInfo

OWNER = "sluiceway"


def model_list(fleet: Fleet, *, created: int) -> dict[str, Any]:
    """Every served model; empty while no tokenizer has been heard.

    Args:
        fleet: What is known.
        created: Unix seconds at which this gateway started.
    """
    models = [_model(name, info, created) for name, info in sorted(fleet.models().items())]
    return {"object": "list", "data": models}


def one_model(fleet: Fleet, name: str, *, created: int) -> dict[str, Any]:
    """One served model.

    Raises:
        ModelNotFound: It is not served here.
    """
    info = fleet.models().get(name)
    if info is None:
        raise ModelNotFound(f"the model {name!r} is not served here", param="model")
    return _model(name, info, created)


def _model(name: str, info: TokenizerInfo, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": name,
        "parent": None,
        "max_model_len": info.max_model_len or None,
    }
