"""Soak: many requests for minutes, with the memory, descriptors and threads of every rank sampled once a second.

    python -m tests.soak --minutes 10 --dp 2 --pp 2      # `make soak`
    python -m tests.soak --minutes 3 --tracemalloc       # also where rank 0 allocated what it still holds

It fails if the memory of a rank grows by more than NOISE_MIB per minute with 95% confidence, if descriptors, threads or
KV blocks leak, or if a request returns other tokens than the first time.
"""
