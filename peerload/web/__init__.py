"""The web server of `peerload web`: metrics, JSON API, live events and the page. It is a separate process and a client of one
agent's control socket, so that the agent parses no HTTP (docs/adr/0035-the-web-server.md)."""
