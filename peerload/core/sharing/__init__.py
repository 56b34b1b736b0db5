"""Load sharing: drives the policies with information, senders, receivers, pairing, searches, and hints about peers."""
