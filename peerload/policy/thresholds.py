"""The parameters that every transfer policy has: each of the four marks may be set by hand."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MARK_MAX = 1e6
"""Tasks per slot; more never wait at one node."""

Mark = Annotated[float, Meta(ge=0.0, le=MARK_MAX)]
"""Tasks per slot, 0 … MARK_MAX."""

SendAt = Annotated[
    float, Meta(ge=0.0, le=MARK_MAX, description="an arriving task is sent on from so many tasks per slot")
]
AcceptBelow = Annotated[
    float, Meta(ge=0.0, le=MARK_MAX, description="others' tasks are accepted below so many tasks per slot")
]
ReceiveBelow = Annotated[
    float, Meta(ge=0.0, le=MARK_MAX, description="others are asked for a task below so many tasks per slot")
]
GiveAbove = Annotated[
    float, Meta(ge=0.0, le=MARK_MAX, description="a waiting task is given to who asks above so many tasks per slot")
]
