"""Whatever comes, goes, grows and falls ill, in any order: no promise about devices is broken (`tests/gpu/walk.py`)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from peerload.model.resources import GpuShare, GpuWait, ResourceRequest
from tests.gpu.walk import GIB, Walk

CARDS = 3


@st.composite
def requests(draw: Any) -> ResourceRequest:
    prefer = tuple(map(str, draw(st.lists(st.integers(0, CARDS - 1), max_size=2, unique=True))))
    wait = draw(st.sampled_from(GpuWait))
    gpus = draw(st.integers(0, len(prefer) if wait is GpuWait.QUEUE and prefer else CARDS))
    share = draw(st.sampled_from([share for share in GpuShare if share is not GpuShare.MPS or gpus == 1]))
    fraction = 1.0
    if gpus == 1 and share is not GpuShare.EXCLUSIVE:
        fraction = draw(st.sampled_from((1.0, 1.0, 0.25, 0.5)))
    return ResourceRequest(
        cpus=draw(st.sampled_from((0.5, 1.0, 3.0))),
        gpus=gpus,
        gpu_mem_bytes=draw(st.sampled_from((0, 1, 8, 20))) * GIB,
        gpu_fraction=fraction,
        gpu_prefer=prefer,
        gpu_wait=wait,
        gpu_wait_s_max=draw(st.sampled_from((0.0, 30.0))),
        gpu_share=share,
        devices=draw(st.sampled_from(((), (), (("fpga", 1),), (("fpga", 2),)))),
    )


NUMBERS = st.integers(0, 50)
STEPS = st.one_of(
    st.tuples(st.just("submit"), requests()),
    st.tuples(st.just("submit"), requests()),
    st.tuples(st.just("end"), NUMBERS),
    st.tuples(st.just("grow"), NUMBERS, st.sampled_from((0.0, 0.5, 1.0, 1.5))),
    st.tuples(st.just("pass_time"), st.sampled_from((0.1, 5.0, 60.0, 1000.0))),
    st.tuples(st.just("others"), NUMBERS, st.sampled_from((0.0, 1.0, 20.0))),
    st.tuples(st.just("ail"), NUMBERS),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from((3.0, 64.0)), st.booleans())
def test_no_promise_is_broken(steps: list[tuple[Any, ...]], cpus: float, is_read: bool) -> None:
    walk = Walk(count=CARDS, cpus=cpus, is_read=is_read)
    for name, *words in steps:
        getattr(walk, name)(*words)
