"""The shipped load policies."""
