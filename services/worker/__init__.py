"""The worker: a model, its KV tensors and its sampler, behind a stream that it dials itself."""
