"""The shipped transfer policies."""
