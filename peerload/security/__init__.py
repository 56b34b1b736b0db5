"""Membership of a cluster and its proof: cluster directory, certificates, TLS, revocation, invitations, addresses."""
