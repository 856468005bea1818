"""The benchmark of a running server: an HTTP client that costs little, the load, and the result."""
