"""The ids of the security rules of docs/security.md. A security event names the rule for which a request was refused."""

from __future__ import annotations

NAME_UNIQUE = "J1"
JOINS_LIMITED = "J2"
FRAMES_BOUNDED = "P1"
"""A frame's size is checked before allocation, and decoding is strict; a peer with too many errors is banned."""
PEERS_LIMITED = "P2"
"""Limits on what one peer may have pending, send in a second and leave in buffers."""
ROLES_CHECKED = "P3"
"""Each message is accepted only from the node that may send it: the home of a task, or its executor."""
CLAIMS_HARMLESS = "P4"
"""Lies about load cost time, never a task."""
REPEATS_HARMLESS = "P5"
"""A repeated or older message changes nothing."""
VERSIONS_CHECKED = "P6"
"""Unknown fields are ignored; unknown versions are refused, never guessed."""
BROKER_AUTHENTIC = "M1"
"""Over MQTT each node publishes only below its own name."""
BROKER_ADVISES = "M2"
"""Commands are never accepted from MQTT or gossip."""

SECURITY_RULES = (
    *("J1", "J2", "J3", "J4", "J5", "J6"),
    *("L1", "L2", "L3", "L4"),
    *("X1", "X2", "X3", "X4", "X5", "X6", "X7"),
    *("F1", "F2", "F3"),
    "T1",
    *("P1", "P2", "P3", "P4", "P5", "P6"),
    *("M1", "M2"),
    "C1",
    *("S2", "S4", "S5", "S6", "S10", "S11", "S13", "S15", "S16", "S17", "S18", "S20"),
)
"""All rules of docs/security.md."""
