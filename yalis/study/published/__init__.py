"""The published study of multi-node inference (arXiv 2511.09557), repeated by model: `yalis plan --study DIR`."""
