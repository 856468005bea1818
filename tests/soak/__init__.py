"""Soak test: runs requests for minutes and samples memory, descriptors and threads of every rank once a second.

    python -m tests.soak --minutes 10 --dp 2 --pp 2      # `make soak`
    python -m tests.soak --minutes 3 --tracemalloc       # also print where rank 0 allocated memory that it holds

It fails if the memory of a rank grows by more than NOISE_MIB per minute with 95% confidence, if descriptors, threads or
KV blocks leak, or if a request returns other tokens than the first time.
"""
