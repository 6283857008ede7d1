"""The scheduler: token ids, requests, KV blocks; drives one engine per attached worker. No text, no tensors."""
