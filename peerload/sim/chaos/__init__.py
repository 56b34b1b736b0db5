"""A whole cluster under faults by seed: the core of the agent with its clock, network, broker, disk and launcher simulated."""
