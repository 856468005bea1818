"""The all-reduce benchmark: the plan, what each rank measures, link measurements, and runs in the lab."""
