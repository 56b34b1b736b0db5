"""Effective request of a task to other nodes, which may know nothing of its command: with the GPU memory that this node has
learned it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.estimates import ANY_MODEL
from peerload.core.resources.admission import gpu_mem_bytes_max
from peerload.core.resources.devices import LEARNED_SHARE

if TYPE_CHECKING:
    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.resources import Profile, ResourceRequest


def asked_of(state: CoreState, work: Work, profile: Profile | None = None) -> ResourceRequest:
    """The request of work, with the memory of each GPU that its command needs where that was not stated but is known. ``profile``: of
    the node that is asked, None = any; of one that could not promise so much a GPU is asked for where nobody else is, as
    the request has it."""
    request = work.spec.request
    need_bytes = state.learned_gpu_bytes(work, (ANY_MODEL,)).get(ANY_MODEL, 0)
    if not need_bytes:
        return request
    if profile is not None:
        most_bytes = gpu_mem_bytes_max(profile, request, work.spec.placement, state.node)
        if most_bytes is None or need_bytes > LEARNED_SHARE * most_bytes:
            return request
    return msgspec.structs.replace(request, gpu_mem_bytes=need_bytes)
