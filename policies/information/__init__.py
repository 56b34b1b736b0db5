"""The shipped information policies."""
