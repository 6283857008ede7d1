"""The shared index of prefix-cache blocks: which engine holds which block key, on which tier."""
