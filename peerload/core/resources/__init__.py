"""Resources of this node: what fits, devices, placement, backfill, and the queue for devices."""
