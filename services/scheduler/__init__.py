"""The scheduler: requests of token ids and the KV blocks they need; one engine per worker."""
