"""The HTTP server: an OpenAI-compatible API over one LLM. Only this package imports its libraries (extra `serve`)."""
