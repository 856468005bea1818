"""The chat page: HTML, style and script without a build step, served as one document."""
