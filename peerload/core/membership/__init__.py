"""Who is in the cluster: gossip, failure detector, suspicion, broadcast queue, anti-entropy, profiles."""
