"""Handoff of a task to another node: the sides of home and executor, leases, results, attempt fence, frozen and parked tasks."""
