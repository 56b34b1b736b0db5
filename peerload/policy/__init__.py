"""The plug-in API: one Protocol per kind of policy, read-only views, and the registry that finds policies by name."""
