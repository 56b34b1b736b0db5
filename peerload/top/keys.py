"""The keys of `peerload top`: one table for what they do, for its help and for docs/top.md."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """Keys that do one thing. names: as Textual calls them; shown: as people read them; changes: it changes something in
    the cluster, so that ``--readonly`` refuses it; hint: its word in the last line, "" for none."""

    names: tuple[str, ...]
    shown: str
    does: str
    says: str
    changes: bool = False
    hint: str = ""


KEYS = (
    Key(("1", "2", "3", "4", "5"), "1 … 5", "toggle", "hide or show a pane; one that there is no room for gets it"),
    Key(("tab",), "Tab", "focus_next", "the next pane: nodes, tasks, events"),
    Key(("shift+tab",), "Shift-Tab", "focus_previous", "the pane before"),
    Key(("enter",), "Enter", "open", "the members of an array, or its one row again; elsewhere as z", hint="open"),
    Key(("down", "j"), "↓, j", "down", "the next row"),
    Key(("up", "k"), "↑, k", "up", "the row before"),
    Key(("pagedown", "ctrl+f"), "PgDn, Ctrl-F", "page_down", "a page down"),
    Key(("pageup", "ctrl+b"), "PgUp, Ctrl-B", "page_up", "a page up"),
    Key(("home", "g"), "Home, g", "first", "the first row"),
    Key(("end", "G"), "End, G", "last", "the last row; with events, the newest"),
    Key(("slash",), "/", "filter", "show only rows with these words; Enter keeps them, Esc drops them", hint="filter"),
    Key(
        ("space",),
        "Space",
        "mark",
        "mark the task, or take its mark away; c, h, r and s are for all that are marked",
        hint="mark",
    ),
    Key(("U",), "U", "unmark", "take all marks away"),
    Key(("w",), "w", "why", "why the task waits, or went where it went", hint="why"),
    Key(("l",), "l", "logs", "the output of the task, as it grows", hint="logs"),
    Key(("c",), "c", "cancel", "cancel the task (asks)", changes=True, hint="cancel"),
    Key(("s",), "s and a letter", "signal", "send a signal to the task (asks)", changes=True, hint="signal"),
    Key(("h",), "h", "hold", "keep a waiting task back", changes=True),
    Key(("r",), "r", "release", "let a held task go on; run one that has ended again", changes=True),
    Key(
        ("d",), "d", "drain", "have the node take no more tasks (asks), or take them again", changes=True, hint="drain"
    ),
    Key(("o",), "o and a letter", "sort", "sort by …; the same again turns it round", hint="sort"),
    Key(("z",), "z", "zoom", "this pane alone, or all again", hint="zoom"),
    Key(("m",), "m", "mine", "only my tasks, or all again", hint="mine"),
    Key(("p",), "p", "pause", "stand still, or go on", hint="pause"),
    Key(("a",), "a", "attach", "see the cluster from the node that is chosen"),
    Key(("question_mark",), "?", "help", "this page", hint="help"),
    Key(("escape",), "Esc", "escape", "drop the filter, the question, the zoom, the marks"),
    Key(("q", "ctrl+c"), "q, Ctrl-C", "quit", "quit", hint="quit"),
)

BY_NAME = {name: key for key in KEYS for name in key.names}
