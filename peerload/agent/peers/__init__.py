"""Links between agents: dialling, handshake, connections, reachability, backpressure, addresses."""
