"""Captured output of tasks: spool, tails, streams to readers with backpressure."""
