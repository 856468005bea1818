"""Tool calls: how a model is told about tools, and how its calls are found in the text it generates."""
