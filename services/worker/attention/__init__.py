"""Attention backends, one a file; the file's name is the flag's value."""
