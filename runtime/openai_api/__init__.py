"""What the embedded engine and the gateway share of being an OpenAI-compatible server; needs no torch."""
