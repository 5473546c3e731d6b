"""A study's problem: specification, search space, dataset, workload, target and constraints."""
