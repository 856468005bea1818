"""On the PYTHONPATH of a test's job: Python imports this in every process before anything else."""

from tests.multiprocess.fault import install

install()
