"""`peerload completions`: completion scripts for bash, zsh and fish: verbs, flags, task ids, nodes, presets and groups.

The scripts call this verb at each TAB (`completions answer WORD…`), so candidates match this version and the current state of the
agent. A slow agent is ignored.
"""

from __future__ import annotations

from typing import Any

from peerload.cli.common.options import DESCRIBE, Described, Options
from peerload.cli.common.selection import STATES, UNFINISHED
from peerload.cli.main import VERBS, load
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import print_lines, print_result, shortened
from peerload.text.tasks import array_of, number_of

AGENT_S_MAX = 0.5
"""Limit for the answer of the agent after TAB."""
TASK_FLAGS = ("--after", "--after-ok")
TASKS_MAX = 200
HELP_WIDTH_MAX = 60
FILES, DIRECTORIES, COMMAND = ":files", ":directories", ":command"
"""Returned instead of candidates: the shell itself completes names of files, of directories, or a command and its words."""
COMMANDS = ("run", "submit", "map")
SIGNALS = "TERM INT KILL HUP USR1 USR2 STOP CONT"

_WAITING = ("queued", "held", "leased")
_ENDED = ("done", "failed", "cancelled", "unknown")
TASKS: dict[str, tuple[str, ...]] = {
    "show": (), "why": (), "trace": (), "logs": (), "ls": (), "exec": ("running",), "events": (), "attach": UNFINISHED, "wait": UNFINISHED, "cancel": UNFINISHED, "signal": ("running",),
    "hold": ("queued",), "release": ("held",), "retry": _ENDED, "prio": _WAITING, "pause": UNFINISHED, "resume": (),
}  # fmt: skip
"""Verbs that take ids, with the states of the tasks offered (none: all)."""
NODES = ("sh", "forget", "drain", "undrain")
WORDS: dict[tuple[str, ...], str] = {
    ("policy",): "ls show check",
    ("cluster",): "show init",
    ("config",): "show check",
    ("completions",): "bash zsh fish",
    ("demo",): "gpu",
    ("group",): "ls set pause resume rm",
    ("service",): "install upgrade uninstall",
    ("signal",): SIGNALS,
}
"""The words that may follow these verbs."""
PATHS = {("policy", "check"): FILES, ("config", "check"): FILES, ("cluster", "init"): DIRECTORIES, ("replay",): FILES}
VALUES = {
    "--chdir": DIRECTORIES, "-d": DIRECTORIES, "--cluster": DIRECTORIES, "--export": FILES, "--config": FILES,
    "--record": FILES, "--socket": FILES, "--output": FILES, "-o": FILES, "--error": FILES, "-e": FILES,
    "--from": FILES, "--wheels": DIRECTORIES, "--prefix": DIRECTORIES, "--root": DIRECTORIES, "--each-line": FILES, "--param-file": FILES, "--joblog": FILES, "--in": FILES, "--env": FILES, "--speeds": FILES, "--plot": FILES, "--csv": FILES,
    "--gpu-wait": "queue schedule", "--prefer": "time balanced energy", "--gpu-share": "auto exclusive time mps", "--lease": "auto", "--signal": SIGNALS,
    "--broker": "mosquitto amqtt", "--model": "reference live",
}  # fmt: skip
"""The values of flags."""
NODE_FLAGS, PRESET_FLAGS, GROUP_FLAGS, LABEL_FLAGS = (
    ("--node", "-w", "--exclude", "-x"), ("--policy", "--compare"), ("--group", "-g"), ("--label", "-C")
)  # fmt: skip

BASH = """\
# completion of peerload in bash:  source <(peerload completions bash)
_peerload() {
    local IFS=$'\\n' current="${COMP_WORDS[COMP_CWORD]}" answer
    mapfile -t answer < <(peerload completions answer plain "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ $current == "=" ]] && current=
    case "${answer[0]}" in
        :files) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current")) ;;
        :directories) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$current")) ;;
        :command)
            if (( ${answer[1]} == COMP_CWORD )); then
                COMPREPLY=($(compgen -c -- "$current"))
            else
                compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current"))
            fi ;;
        *) COMPREPLY=("${answer[@]}") ;;
    esac
}
complete -F _peerload peerload
"""
ZSH = """\
#compdef peerload
# completion of peerload in zsh:  source <(peerload completions zsh)     or this text as _peerload in your fpath
_peerload() {
    local -a answer
    answer=("${(@f)$(peerload completions answer colon "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    case "${answer[1]}" in
        :files) _files ;;
        :directories) _files -/ ;;
        :command) shift ${answer[2]} words; (( CURRENT -= ${answer[2]} )); _normal ;;
        "") ;;
        *) _describe -V peerload answer ;;
    esac
}
if [[ "${funcstack[1]}" == _peerload ]]; then
    _peerload "$@"
else
    compdef _peerload peerload
fi
"""
FISH = """\
# completion of peerload in fish:  peerload completions fish | source
function __peerload_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answer (peerload completions answer tab $words[2..] 2>/dev/null)
    switch "$answer[1]"
        case :files
            __fish_complete_path (commandline -ct)
        case :directories
            __fish_complete_directories (commandline -ct)
        case :command
            __fish_complete_subcommand --commandline $words[(math $answer[2] + 1)..]
        case '*'
            printf '%s\\n' $answer
    end
end
complete -c peerload -f -a '(__peerload_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
INSTALLED = {
    "bash": "echo 'source <(peerload completions bash)' >> ~/.bashrc",
    "zsh": "echo 'source <(peerload completions zsh)' >> ~/.zshrc      after compinit",
    "fish": "peerload completions fish > ~/.config/fish/completions/peerload.fish",
}
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-")
"""Characters that no shell interprets. Candidates with others are left out, since bash inserts them as they are: the label of another
node may be a command."""
JOINED = {"plain": "", "colon": ":", "tab": "\t"}
"""The separator between a candidate and its description for each kind of shell; "": no description."""


def main(words: list[str]) -> int:
    """Run the verb. The scripts call `answer FORM WORD…`; WORD… are the words after `peerload`, the last one unfinished."""
    if words[:1] == ["answer"]:
        return _answer(words[1:2], words[2:])
    reader = Options(
        "completions",
        "Print a script by which your shell completes verbs, flags, ids of tasks, nodes, presets and groups.",
        usage="bash | zsh | fish",
        epilog="\n".join(f"{shell}:  {line}" for shell, line in INSTALLED.items()),
    )
    reader.add_argument("shell", nargs="?", metavar="SHELL")
    flags = reader.read(words)
    if flags.shell not in SCRIPTS:
        what = f"no such shell: {flags.shell!r}" if flags.shell else "the shell is missing"
        raise UsageError(f"completions: {what}", hint="there are:  peerload completions bash | zsh | fish")
    script = SCRIPTS[flags.shell]
    print_result({"shell": flags.shell, "script": script}, script.splitlines(), as_json=flags.json)
    return 0


def _answer(form: list[str], words: list[str]) -> int:
    between = JOINED.get("".join(form), "")
    lines = []
    for candidate, says in answered(words):
        if not PLAIN.issuperset(candidate):
            continue
        told = shortened(printable(says), HELP_WIDTH_MAX)
        word = candidate.replace(":", "\\:") if between == ":" and not candidate.startswith(":") else candidate
        lines.append(f"{word}{between}{told}" if between and told else word)
    print_lines(lines)
    return 0


def answered(words: list[str]) -> list[tuple[str, str]]:
    """The candidates for the last word, each with a description; or one of FILES, DIRECTORIES, COMMAND (followed by the index of the
    first word of the command, `peerload` being 0)."""
    *before, last = words or [""]
    last = "" if last == "=" else last
    verbs = list(VERBS.items())
    if not before or before == ["--debug"]:
        return _beginning_with(last, [*verbs, ("help", "what a verb takes"), ("--help", ""), ("--version", "")])
    if before == ["help"]:
        return _beginning_with(last, verbs)
    at = 1 if before[0] == "--debug" else 0
    verb, rest = before[at], before[at + 1 :]
    if verb not in VERBS:
        return []
    flags = flags_of(verb)
    given, positional = _parted(rest, flags, is_command=verb in COMMANDS)
    if positional and verb in COMMANDS:
        return [(COMMAND, ""), (str(len(before) - len(positional) + 1 - (1 if positional[0] == "--" else 0)), "")]
    flag, equals, value = last.partition("=")
    if given or (equals and flag in flags):
        return _values(verb, given or flag, last if given else value, "" if given else f"{flag}=")
    if last.startswith("-"):
        return _beginning_with(last, [(name, says) for name, (_, says) in flags.items()])
    return _positional(verb, positional, last, len(before) + 1)


def flags_of(verb: str) -> dict[str, tuple[bool, str]]:
    """The flags of a verb: (True if the flag takes a value, help) by name."""
    try:
        load(verb)([DESCRIBE])
    except Described as told:
        return {name: (takes, says.partition("\n")[0].replace("%%", "%")) for name, (takes, says) in told.flags.items()}
    except PeerloadError:
        return {}
    return {}


def _parted(words: list[str], flags: dict[str, tuple[bool, str]], *, is_command: bool) -> tuple[str, list[str]]:
    """The flag whose value comes next ("" if none), and the words that are not flags."""
    positional: list[str] = []
    wanted = ""
    for index, word in enumerate(words):
        if word == "=":  # bash splits `--flag=value`
            continue
        if wanted:
            wanted = ""
        elif word == "--" or (is_command and not word.startswith("-")):
            return "", words[index:]
        elif word.startswith("-") and word != "-":
            wanted = word if flags.get(word, (False, ""))[0] else ""
        else:
            positional.append(word)
    return wanted, positional


def _beginning_with(prefix: str, candidates: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, says) for name, says in candidates if name.startswith(prefix)]


def _values(verb: str, flag: str, value: str, front: str) -> list[tuple[str, str]]:
    done, comma, last = value.rpartition(",")
    front += done + comma
    if flag in NODE_FLAGS and verb not in ("up", "agent"):
        candidates = _nodes()
    elif flag in TASK_FLAGS:
        candidates = _tasks((), taken=done.split(","), short=last[:1].isdigit())
    elif flag in PRESET_FLAGS:
        candidates = _presets()
    elif flag in GROUP_FLAGS:
        candidates = _groups()
    elif flag in LABEL_FLAGS:
        candidates = sorted({(str(label), "") for node in _ask("nodes").get("nodes", ()) for label in node["labels"]})
    elif flag == "--state" and verb not in ("up", "agent", "down"):
        candidates = [(state, "") for state in STATES]
    elif flag == "--what":
        from peerload.cli.verbs.ls import WHAT

        candidates = [(kind, "") for kind in WHAT]
    else:
        told = VALUES.get(flag, DIRECTORIES if flag == "--state" else "")
        candidates = [(word, "") for word in told.split()]
        if told.startswith(":"):
            return candidates
    return [(front + name, says) for name, says in _beginning_with(last, candidates)]


def _positional(verb: str, positional: list[str], last: str, number: int) -> list[tuple[str, str]]:
    words = (verb, *positional)
    if verb in COMMANDS:
        return [(COMMAND, ""), (str(number), "")]
    if words in WORDS:
        return _beginning_with(last, [(word, "") for word in WORDS[words].split()])
    if words[:2] == ("policy", "show"):
        return _beginning_with(last, _presets())
    for known, what in PATHS.items():
        if words[: len(known)] == known:
            return [(what, "")]
    if verb == "group" and len(words) == 2:  # noqa: PLR2004 -- a group and an action
        return _beginning_with(last, _groups())
    if verb in TASKS:
        return _beginning_with(last, _tasks(TASKS[verb], taken=positional, short=last[:1].isdigit()))
    if verb in NODES:
        return _beginning_with(last, _nodes())
    return []


# -- from the agent ----------------------------------------------------------------------------------------------------


def _ask(verb: str, **fields: object) -> dict[str, Any]:
    """The reply of the agent; empty if it does not answer quickly."""
    try:
        with AgentConnection(timeout_s=AGENT_S_MAX, room_s=0.0) as client:
            return client.call(verb, **fields)
    except PeerloadError:
        return {}


def _tasks(states: tuple[str, ...], *, taken: list[str], short: bool) -> list[tuple[str, str]]:
    found = {"@": "my last task"}
    for task in reversed(_ask("tasks", states=list(states), limit=TASKS_MAX, gathered=True).get("tasks", ())):
        name = str(task["id"]) if number_of(task) == 1 else array_of(str(task["id"]))
        found.setdefault(name.partition("/")[2] if short else name, f"{task['state']}  {task.get('name') or ''}")
    return [(name, says) for name, says in found.items() if name not in taken]


def _nodes() -> list[tuple[str, str]]:
    return [(str(node["node"]), str(node["state"])) for node in _ask("nodes").get("nodes", ())]


def _presets() -> list[tuple[str, str]]:
    return [(str(name), "a preset") for name in _ask("policy").get("presets", ())]


def _groups() -> list[tuple[str, str]]:
    return [(str(group["name"]), "a group") for group in _ask("groups").get("groups", ())]
