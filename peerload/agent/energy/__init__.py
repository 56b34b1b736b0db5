"""Energy of this node in action: the price feed, controls of its power, and power-down."""
