"""The HTTP server. Only this package imports its optional libraries."""
