"""Who belongs to a cluster, and how that is proven: cluster directory, certificates, TLS, revocation, invitations, addresses."""
