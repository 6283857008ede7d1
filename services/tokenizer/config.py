"""Settings of the tokenizer service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.config import ServiceConfig


class TokenizerConfig(ServiceConfig):
    """What the tokenizer service can be told."""

    port: int = Field(
        50051, ge=0, le=65535, description="Port to listen on for gRPC; 0 = any free one."
    )
    http_port: int = Field(
        9101, ge=0, le=65535, description="Port of /metrics over HTTP; 0 = any free one."
    )
    model: Path = Field(
        ...,
        description="Directory that holds tokenizer.json, config.json and the chat template.",
    )
    served_model_name: str | None = Field(
        None,
        description="Name that requests use; unset = the last part of the model's path.",
    )
    schedulers: tuple[str, ...] = Field(
        ("127.0.0.1:50052",),
        description="Addresses of the schedulers (host:port or dns:///name:port); a Session is "
        "kept to each.",
    )
    kvstores: tuple[str, ...] = Field(
        (),
        description="Addresses of the KV index, asked who has a prompt cached; may be none.",
    )
    encode_threads: int = Field(
        2, ge=1, le=64, description="Threads that render templates and encode long prompts."
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Whether requests may bring a chat template, which can burn any amount of CPU.",
    )
    max_choices: int = Field(
        128, ge=1, description="Most choices (n) that one request may ask for."
    )

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.resolve().name
