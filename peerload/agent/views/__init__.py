"""Tasks, nodes, completion and diagnostics as objects in responses to clients."""
