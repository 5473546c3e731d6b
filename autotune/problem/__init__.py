"""The task of a study: specification, search space, dataset, workload, target, constraints."""
