"""Membership of the cluster: gossip, failure detector, suspicion, broadcast queue, anti-entropy, profiles."""
