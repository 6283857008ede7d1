"""The paged KV tensors: their shape, their size, their allocation."""
