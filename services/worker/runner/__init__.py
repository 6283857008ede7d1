"""Runs steps: rows of tensors for running requests, inputs gathered from them, results read out."""
