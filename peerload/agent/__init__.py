"""The asyncio driver: sockets, files, processes and clocks around one `Node`."""
