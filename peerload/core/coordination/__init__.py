"""What spans several machines of a node: intake and dispatch of tasks, what runs here, requests of clients, drain, shortage."""
