"""Text to tokens and back: chat templates, incremental detokenization, stop strings. No torch."""
