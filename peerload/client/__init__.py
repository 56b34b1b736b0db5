"""Everything that talks to the socket of an agent, and the Python interface: Client, AsyncClient, Executor."""
