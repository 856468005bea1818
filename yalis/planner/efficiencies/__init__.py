"""Efficiencies of the engine's kernels as data: one JSON file for each kind of device they were measured on."""
