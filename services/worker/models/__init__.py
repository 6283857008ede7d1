"""Model families, one a file; the file's name is Hugging Face's model_type."""
