"""Requests that another node has to answer: router, client, server, validation of responses."""
