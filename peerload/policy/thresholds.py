"""Parameters that every transfer policy has: each of the four thresholds may be set by hand."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

THRESHOLD_MAX = 1e6
"""Tasks per slot; more never wait at one node."""

Threshold = Annotated[float, Meta(ge=0.0, le=THRESHOLD_MAX)]
"""Tasks per slot, 0 … THRESHOLD_MAX."""

SendAt = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="an arriving task is sent on from so many tasks per slot")
]
AcceptBelow = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="others' tasks are accepted below so many tasks per slot")
]
ReceiveBelow = Annotated[
    float, Meta(ge=0.0, le=THRESHOLD_MAX, description="others are asked for a task below so many tasks per slot")
]
GiveAbove = Annotated[
    float,
    Meta(ge=0.0, le=THRESHOLD_MAX, description="a waiting task is given to who asks above so many tasks per slot"),
]
