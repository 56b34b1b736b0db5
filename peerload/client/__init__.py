"""Clients of an agent's socket, and the Python interface: Client, AsyncClient, Executor."""
