"""Is this machine, and each rank of a job, ready? The checks of `yalis doctor`, also used by `yalis accept`."""
