"""Predicts how a model runs on a machine: machines as data, step times, the engine on a virtual clock, and a search."""
