"""Frozen values shared by all packages: tasks, resources, load, messages, events, actions, errors, config."""
