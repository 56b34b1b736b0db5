"""Modules that several verbs share: options, selections, output, terminals, processes of agents."""
