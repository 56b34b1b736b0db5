"""The web server of `peerload web`: metrics, JSON API, live events and the page. A process of its own and a client of one
agent's control socket, so that no HTTP is parsed in the agent (docs/adr/0035-the-web-server.md)."""
