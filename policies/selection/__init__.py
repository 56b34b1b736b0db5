"""The shipped selection policies."""
