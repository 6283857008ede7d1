"""How models mark what they think before they answer: one file per format, each with ``FORMAT``."""
