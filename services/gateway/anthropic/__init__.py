"""Anthropic's JSON: what requests may say and what replies look like. Knows no sockets."""
