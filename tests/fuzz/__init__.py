"""Fuzzing: seeded mutations of untrusted input (handshakes and model files), run with limits of time and memory.

    python -m tests.fuzz --count 20000 --seed 1          # all targets; `make fuzz`
    python -m tests.fuzz --target gguf --only 17 --seed 1  # repeat one input in this process, with its traceback

An input is accepted, or refused with a YalisError. Anything else is a failure: another exception, a crash, more than
LIMIT_S seconds, more than LIMIT_BYTES of memory. Input i of a target depends on the seed and i alone.
"""
