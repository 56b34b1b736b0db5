"""Frozen values that every room shares: tasks, resources, load, messages, events, actions, errors, config."""
