"""Options of a submission that only its home has to know: they are sent to no other node."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

AFTER_MAX = 100
"""Tasks, or whole arrays, that one submission may wait for in each of the two ways."""
RETRIES_MAX = 100

GroupName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")]
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}=[^\x00-\x1f\x7f]{0,128}\Z")]
"""`key=value`: what a user marks tasks with, to select them by."""
TAGS_MAX = 16
Awaited = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=80)], ...], Meta(max_length=AFTER_MAX)]


PATH_BYTES_MAX = 4096
NOTIFY_BYTES_MAX = 64 << 10

FilePattern = Annotated[bytes, Meta(max_length=PATH_BYTES_MAX)]


class CompletionJob(enum.StrEnum):
    """A job of a home after the end of a task: its output in the files that its user named, and the command that is to be
    run then."""

    FILES = "files"
    NOTIFY = "notify"


class SubmitOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Of all tasks of one submission.

    group: whose slots they take, "" = none; after: ids of tasks and arrays that have to have ended before they start,
    however that was; after_ok: of those that have to have succeeded; retries: how often one that failed is tried again.
    output_file, error_file: where home writes the output of each as it comes, absolute paths in which %j, %A, %a, %x, %N
    and %% stand for something, b"" = nowhere; notify: what a shell is given at home when all of them have ended, b"" = nothing.
    owner: the uid whose tasks they are at a home in system mode, which knows it from the operating system, -1 = that of the
    agent. tags: one `key=value` for each key. files_home: the directory that output files come home to.
    """

    group: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?\Z")] = ""
    after: Awaited = ()
    after_ok: Awaited = ()
    retries: Annotated[int, Meta(ge=0, le=RETRIES_MAX)] = 0
    output_file: FilePattern = b""
    error_file: FilePattern = b""
    notify: Annotated[bytes, Meta(max_length=NOTIFY_BYTES_MAX)] = b""
    owner: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    tags: Annotated[tuple[Tag, ...], Meta(max_length=TAGS_MAX)] = ()
    files_home: FilePattern = b""
    start_by: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    """Unix time until which the start may wait for a cheaper hour, 0 = it does not wait."""

    @property
    def awaits(self) -> bool:
        """True if its tasks wait for others."""
        return bool(self.after or self.after_ok)

    def again(self) -> SubmitOptions:
        """The options of a task that repeats this one on request of a user: it waits for nothing any more."""
        return msgspec.structs.replace(self, after=(), after_ok=())

    def chores(self) -> tuple[CompletionJob, ...]:
        """The completion jobs of a task that ends."""
        files = (CompletionJob.FILES,) if self.output_file or self.error_file else ()
        return (*files, CompletionJob.NOTIFY) if self.notify else files


NO_TERMS = SubmitOptions()


def owner_key(owner: int, user: str) -> str:
    """The owner of a submission, as one word: a uid; or ``node:user`` where it was sent from another node, since no account's
    name has a colon in it; "" = the agent's own."""
    return str(owner) if owner >= 0 else user


class TaskOutcome(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Outcome of a task, or of a whole array, that others wait for. is_over: all of it has ended; failed: what of it
    has not succeeded, in words, "" = nothing so far; lost: why nobody can tell any more, "" = that is not so."""

    task: str
    is_over: bool = False
    failed: str = ""
    lost: str = ""

    @property
    def is_news(self) -> bool:
        """True if anything has become of it."""
        return bool(self.is_over or self.failed or self.lost)


class GroupSettings(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Settings of a group of tasks of this home. slots: at most so many of them are leased at a time, 0 = any number;
    is_paused: none of them is started."""

    name: str
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    is_paused: bool = False


WORDS_MAX = 200
"""Bound on the reason of the failure of a task that others wait for, in characters."""


def failed_words(task: str, *, is_cancelled: bool, reason: str) -> str:
    """Text about a task that has not succeeded, for those that wait for it."""
    return f"{task} was cancelled" if is_cancelled else f"{task} failed ({reason})"[:WORDS_MAX]
