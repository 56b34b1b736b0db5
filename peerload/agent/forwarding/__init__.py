"""Requests that another node answers: router, client, server, validation of responses."""
