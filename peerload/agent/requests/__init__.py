"""Requests of clients: one file for each group of verbs, and the dispatch to them."""
