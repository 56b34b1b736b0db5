"""Flows across the machines of a node: intake and dispatch of tasks, running tasks, requests of clients, drain, shortage."""
