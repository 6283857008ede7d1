"""From logits to tokens: one file per transform, each skipped when no row uses it."""
