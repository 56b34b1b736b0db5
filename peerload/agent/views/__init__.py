"""Tasks, nodes, completion and diagnostics as the objects that clients get."""
