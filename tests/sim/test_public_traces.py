"""Public formats, with samples made here: what becomes a task, and that everything else is counted and named."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean

import msgspec
import pytest

from peerload.model.errors import ConfigError
from peerload.sim.outcome import outcome
from peerload.sim.recorded import TaskTrace, read_public
from peerload.sim.scenario import Scenario, play
from peerload.sim.service import Modulation, TaskClass, draw_of, read_class, read_modulation, read_service
from tests.each import each
from tests.wording import Says

SWF = """; Version: 2.2
; MaxProcs: 4
1 0 5 30 2 -1 -1 2 -1 -1 1 3 1 1 1 -1 -1 -1
2 10 -1 20 -1 -1 -1 1 -1 -1 1 4 1 1 1 -1 -1 -1
3 12 -1 -1 1 -1 -1 1 -1 -1 5 4 1 1 1 -1 -1 -1

4 13 -1 60 64 -1 -1 64 -1 -1 1 4 1 1 1 -1 -1 -1
5 14 -1 x 1 -1 -1 1 -1 -1 1 4 1 1 1 -1 -1 -1
6 15 20
7 9 -1 7 -1 -1 -1 -1 -1 -1 1 4 1 1 1 -1 -1 -1
"""
ALIBABA_2020 = """j1,worker,2,Terminated,100,160,600,29.3,100,V100
j2,worker,1,Running,110,,600,29.3,50,T4
j3,ps,1,Terminated,120,150,100,8,25,MISC
j4,worker,0,Terminated,120,150,100,8,0,
j5,worker,1
"""
ALIBABA_2023 = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p1,4000,1024,1,1000,,LS,Succeeded,0,90,30
p2,2000,1024,0,0,,BE,Failed,10,40,
p3,2000,1024,8,1000,,LS,Succeeded,10,40,20
p4,2000,1024,0,0,,BE,Pending,10,,
"""
GOOGLE = """time,type,collection_id,instance_index,resource_request.cpus
1000000,0,7,0,0.5
2000000,SUBMIT,7,1,0.25
3000000,3,7,0,
4000000,SCHEDULE,7,1,
5000000,2,7,1,
13000000,6,7,0,0.5
14000000,5,7,1,0.25
15000000,0,8,0,0.1
16000000,6,9,0,0.1
0,0,10,0,0.1
"""


def tasks(trace: TaskTrace) -> list[tuple[float, float, float, int]]:
    return list(zip(trace.arrivals, trace.durations, trace.cpus, trace.gpus, strict=True))


def left_out(trace: TaskTrace) -> list[tuple[str, int]]:
    """Why rows are left out, and the first line that is for that."""
    notes = [note.partition("left out: ")[2].rstrip(")").partition(" (line ") for note in trace.notes]
    return [(why, int(line.partition(",")[0])) for why, _, line in notes]


def test_standard_workload_format() -> None:
    trace = read_public("t.swf", SWF, "swf", 4, 0)
    assert tasks(trace) == [(0.0, 30.0, 2.0, 0), (9.0, 7.0, 1.0, 0), (10.0, 20.0, 1.0, 0)]
    assert left_out(trace) == [
        (Says.NO_RUN_TIME(), 5), (Says.TOO_WIDE(), 7), (Says.NO_NUMBER("field 4"), 8), ("fewer than 18 fields", 9),
    ]  # fmt: skip
    assert len(read_public("t.swf", SWF, "swf", 64, 0)) == 4
    assert tasks(read_public("t.swf", SWF, "swf", 4, 0, tasks=2)) == tasks(trace)[:2]


def swf_line(submitted: str, run_s: str, status: int = 1) -> str:
    return f"1 {submitted} -1 {run_s} 1 -1 -1 1 -1 -1 {status} 1 1 1 1 -1 -1 -1\n"


def test_parts_of_a_job_do_not_count_beside_the_line_that_sums_it_up() -> None:
    lines = [swf_line("0", "20", 0), *(swf_line("0", "10", status) for status in (2, 3, 4)), swf_line("9", "5", 5)]
    trace = read_public("t.swf", "".join(lines), "swf", 1, 0)
    assert list(trace.durations) == [20.0, 5.0]
    assert left_out(trace) == [(Says.PART_OF_JOB(), 2)]


def test_a_line_beyond_all_bounds_is_left_out() -> None:
    lines = swf_line("0", "3") + swf_line("1", "1e300") + swf_line("1e18", "3")
    trace = read_public("t.swf", lines, "swf", 1, 0)
    assert tasks(trace) == [(0.0, 3.0, 1.0, 0)]
    assert left_out(trace) == [(Says.RUNS_LONG("1e+09"), 2), (Says.ARRIVES_LATE("1e+10"), 3)]
    with pytest.raises(ConfigError, match=r"t\.swf spans 5e\+09 s"):
        read_public("t.swf", swf_line("0", "3") + swf_line("5e9", "3"), "swf", 1, 0)


def test_alibaba_of_both_years() -> None:
    trace = read_public("t.csv", ALIBABA_2020, "alibaba", 8, 2)
    assert tasks(trace) == [(0.0, 60.0, 6.0, 1)] * 2 + [(20.0, 30.0, 1.0, 1)]
    assert left_out(trace) == [
        (Says.NO_NUMBER("end_time"), 2), (Says.NO_INSTANCES(), 4), ("not 10 columns", 5),
    ]  # fmt: skip
    trace = read_public("t.csv", ALIBABA_2023, "alibaba", 8, 2)
    assert tasks(trace) == [(0.0, 60.0, 4.0, 1)]
    assert left_out(trace) == [(Says.NOT_SCHEDULED(), 3), (Says.TOO_WIDE(), 4)]


def test_a_line_of_several_instances_is_left_out_once() -> None:
    wide = "j,worker,5,Terminated,0,100,400,10,0,\n" + ALIBABA_2020
    (note, *_) = read_public("t.csv", wide, "alibaba", 3, 2).notes
    assert note == f"2 of the lines of t.csv left out: {Says.TOO_WIDE()} (line 1, 2)"


def test_a_table_that_is_no_csv_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"t\.csv:2: no CSV"):
        read_public("t.csv", "name,creation_time,deletion_time\np,1," + "2" * 200_000 + "\n", "alibaba", 1, 0)


def test_google_events_are_joined() -> None:
    trace = read_public("t.csv", GOOGLE, "google", 1, 0)
    assert tasks(trace) == [(0.0, 10.0, 0.5, 0), (1.0, 10.0, 0.25, 0)]
    assert left_out(trace) == [
        (Says.NEVER_SCHEDULED(), 10), (Says.OUTSIDE_TRACE(), 11),
        (Says.NEVER_ENDED(), 9),
    ]  # fmt: skip
    events = GOOGLE.replace("5000000,2,7,1,", "5000000,77,7,1,\n5500000,,7,1,\n6000000,QUEUE,7,1,")
    assert (Says.NO_EVENT(), 6) in left_out(read_public("t.csv", events, "google", 1, 0))
    rows = [line.split(",") for line in GOOGLE.splitlines()]
    as_json = [
        json.dumps({**dict(zip(rows[0][:4], row, strict=False)), "resource_request": {"cpus": row[4] or None}})
        for row in rows[1:]
    ]
    assert tasks(read_public("t.json", "\n".join([*as_json, "[]"]), "google", 1, 0)) == tasks(trace)


def test_a_trace_without_tasks_says_why() -> None:
    with pytest.raises(ConfigError, match="fewer than 18 fields"):
        read_public("t.swf", "1 2 3\n", "swf", 1, 0)
    with pytest.raises(ConfigError, match="collection_id"):
        read_public("t.csv", "a,b\n1,2\n", "google", 1, 0)


def test_what_was_left_out_is_a_note_of_the_outcome() -> None:
    trace = read_public("t.swf", SWF, "swf", 4, 0)
    asked = Scenario(policy="none", nodes=2, slots=4, trace=trace, tasks=3, warm_up=0, is_live=True)
    asked.check()
    found = outcome(asked, [play(asked, 1, 0, clock=lambda: 0.0, passed=lambda _tasks: None)])
    assert [note for note in found.warnings if "left out" in note] == list(trace.notes)


# -- synthetic workloads -------------------------------------------------------------------------------------------------


@each(
    ("text", "variation"),
    [("lognormal:4", 4.0), ("weibull:0.5", 5.0), ("weibull:2", 4 / math.pi - 1), ("lognormal:0.25", 0.25)],
)
def test_distributions_have_mean_1_and_their_variation(text: str, variation: float) -> None:
    service, rng = read_service(text), random.Random(1)
    draw = draw_of(service.name, service.parameters)
    drawn = [draw(rng) for _ in range(40_000)]
    assert str(service) == text
    mean = fmean(drawn)
    assert mean == pytest.approx(1.0, abs=0.05)
    assert fmean((value - mean) ** 2 for value in drawn) == pytest.approx(variation, rel=0.25)


@each("text", ["mmpp:10,20", "daily:0.8,100"])
def test_modulated_arrivals_keep_their_mean_rate_and_are_burstier(text: str) -> None:
    modulation = read_modulation(text)
    assert str(modulation) == text
    setup = Scenario(policy="none", nodes=4, load=0.5, modulation=modulation, tasks=1, warm_up=0).setup()
    arrivals = setup.arrivals(random.Random(2))
    counts = [0] * 400
    while (at_s := next(arrivals).at_s) < 4000:
        counts[int(at_s / 10)] += 1
    mean = fmean(counts)
    assert mean == pytest.approx(20.0, rel=0.15)
    assert fmean((count - mean) ** 2 for count in counts) > 1.5 * mean  # of a Poisson stream: the mean


@each("text", ["mmpp:1,20", "mmpp:10", "daily:2,5", "daily:0.5,0", "weekly:1,2", "mmpp:nan,3"])
def test_other_modulations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        read_modulation(text)


def test_a_mix_of_classes_makes_the_load_and_has_its_shares() -> None:
    classes = (read_class("share=0.75"), read_class("share=0.25 mean=8 service=det cpus=2"))
    assert classes[1] == TaskClass(0.25, 8.0, read_service("det"), 2.0)
    asked = Scenario(policy="none", nodes=5, slots=2, load=0.7, classes=classes, tasks=1, warm_up=0)
    asked.check()
    arrivals = asked.setup().arrivals(random.Random(1))
    drawn = [next(arrivals) for _ in range(8000)]
    work = sum(one.service_s * math.ceil(one.cpus) for one in drawn)
    assert work / drawn[-1].at_s / 10 == pytest.approx(0.7, rel=0.06)
    assert sum(one.cpus == 2.0 for one in drawn) / 8000 == pytest.approx(0.25, abs=0.02)
    assert {one.service_s for one in drawn if one.cpus == 2.0} == {8.0}
    with pytest.raises(ConfigError, match="3 cpus"):
        msgspec.structs.replace(asked, classes=(TaskClass(1.0, cpus=3.0),)).check()


@each("text", ["share=0", "mean=2", "share=1 mean=0", "share=1 colour=2", "share=1 gpus=0.5", "share=x", "share"])
def test_other_classes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_class(text)


def test_a_burst_has_a_largest_rate() -> None:
    assert Modulation("mmpp", (3.0, 1.0)).largest == 1.5
