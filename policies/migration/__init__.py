"""The shipped migration policies."""
