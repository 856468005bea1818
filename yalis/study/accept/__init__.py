"""`yalis accept`: does this installation work on these hosts, how fast is it, and is that what the planner expects?"""
