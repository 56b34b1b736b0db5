"""The shipped location policies."""
