"""Report of a run, in numbers and in a few lines."""

from __future__ import annotations

import msgspec


class Report(msgspec.Struct, frozen=True):
    """Times in simulated seconds; probes, messages and transfers counted over the whole run."""

    tasks: int
    ended: int
    mean_response_s: float
    p95_response_s: float
    makespan_s: float
    transfers: int
    probes: int
    messages: int
    trace_hash: str
    counts: dict[str, int]

    def text(self) -> str:
        """For a terminal."""
        tasks = max(self.ended, 1)
        return "\n".join(
            (
                f"tasks ended      {self.ended} of {self.tasks}",
                f"mean response    {self.mean_response_s:.3f} s   p95 {self.p95_response_s:.3f} s",
                f"makespan         {self.makespan_s:.3f} s",
                f"transfers        {self.transfers}",
                f"probes           {self.probes / tasks:.2f} a task",
                f"messages         {self.messages / tasks:.2f} a task",
                f"trace            {self.trace_hash}",
            )
        )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that is not below this share of them; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
