"""The same core on an event heap: simulated clock, network, disk and launcher; no scheduling idea lives here."""
