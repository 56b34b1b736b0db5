"""`peerload map`: inputs, templates, batches, job log, and what is shown meanwhile."""
