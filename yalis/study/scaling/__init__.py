"""`yalis bench scaling`: one throughput benchmark over rank counts, parallelism schemes and all-reduce backends."""
