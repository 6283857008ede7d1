"""The gateway: OpenAI's HTTP API in front of the tokenizers."""
