"""What several verbs share: options, selections, output, terminals, agents to be started."""
