"""`yalis serve`: the OpenAI-compatible HTTP server."""
