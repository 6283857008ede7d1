"""From a Hugging Face directory to a model whose weights are in place."""
