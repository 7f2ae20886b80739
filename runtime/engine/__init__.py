"""The embedded OpenAI-compatible inference server: tokenizer, chat template, model, batching, sampling, HTTP.

Importing the package loads nothing heavy; `model`, `cache`, `sampler` and `batcher` need torch.
"""
