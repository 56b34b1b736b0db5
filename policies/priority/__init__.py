"""The shipped priority policies."""
