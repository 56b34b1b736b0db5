"""`peerload run` on another node is as the command itself: the same stdout, stderr and exit status, byte for byte.

Each case is a line for sh in which ``$RUN`` stands before a command: nothing the first time, `peerload run` on another
node the second. What both give is compared. Of those in TOLD, peerload says on stderr in its own words what was wrong.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.integration.cluster import Agent, Cluster, program, without_waits
from tests.support import in_short, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60.0

EXIT_CODES = {
    **{
        f"exit {code}": f"exec $RUN sh -c 'exit {code}'" for code in (0, 1, 2, 3, 42, 100, 124, 126, 127, 128, 130, 255)
    },
    "true": "exec $RUN true",
    "false": "exec $RUN false",
    "exit 256 is 0": "exec $RUN sh -c 'exit 256'",
    "the last of a list": "exec $RUN sh -c 'true; false'",
    "of a subshell": "exec $RUN sh -c '(exit 7)'",
    "of a pipe": "exec $RUN sh -c 'exit 3 | exit 4'",
    "set -e": "exec $RUN sh -c 'set -e; false; echo never'",
    "and or": "$RUN false || $RUN true && echo yes",
    "negated": "! $RUN false; echo $?",
    "in an if": "if $RUN test 1 = 2; then echo then; else echo else; fi",
    "in a loop": 'for n in 1 2 3; do $RUN sh -c "exit $n"; echo $?; done',
    "shows as $?": "$RUN sh -c 'exit 9'; echo $?",
    "exec within": "exec $RUN sh -c 'exec sh -c \"exit 5\"'",
}
SIGNALS = {
    **{
        f"ended by {name}": f"exec $RUN sh -c 'kill -{name} $$; sleep 5'"
        for name in ("TERM", "KILL", "INT", "HUP", "USR1", "USR2", "PIPE", "ALRM", "ABRT", "SEGV", "BUS", "FPE", "ILL")
    },
    "a trap": "exec $RUN sh -c 'trap \"echo caught; exit 6\" TERM; kill -TERM $$; echo never'",
    "ignored": "exec $RUN sh -c 'trap \"\" TERM; kill -TERM $$; echo goes on'",
    "a child's": "exec $RUN sh -c 'sh -c \"kill -KILL \\$\\$\" 2>/dev/null; echo $?'",
    "an exit trap": "exec $RUN sh -c 'trap \"echo bye\" EXIT; exit 3'",
    "stopped and continued": "exec $RUN sh -c '(until test -e on; do sleep 0.1; kill -CONT $$; done) & kill -STOP $$; : >on; wait; echo on'",
}
OUTPUT = {
    "nothing": "exec $RUN true",
    "one line": "exec $RUN echo hello",
    "no newline at the end": "exec $RUN printf abc",
    "only a newline": "exec $RUN echo",
    "empty lines": "exec $RUN printf '\\n\\n\\n'",
    "every byte": "exec $RUN python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(256)))'",
    "every byte on stderr": "exec $RUN python3 -c 'import sys; sys.stderr.buffer.write(bytes(range(256)))'",
    "zeros": "exec $RUN head -c 100000 /dev/zero",
    "carriage returns": "exec $RUN printf 'a\\r\\nb\\r'",
    "escapes": "exec $RUN printf '\\033[31mred\\033[0m\\007'",
    "not UTF-8": "exec $RUN printf '\\377\\376\\200'",
    "UTF-8": "exec $RUN printf 'äöü€𝄞\\n'",
    "a long line": "exec $RUN python3 -c 'print(\"x\" * 300000)'",
    "a megabyte": "exec $RUN python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(256)) * 4096)'",
    "five megabytes on each": "exec $RUN sh -c 'head -c 5000000 /dev/zero; head -c 5000000 /dev/zero >&2'",
    "stderr alone": "exec $RUN sh -c 'echo bad >&2'",
    "both apart": "exec $RUN sh -c 'echo out; echo err >&2; echo out2; echo err2 >&2'",
    "many turns": "exec $RUN sh -c 'for n in 1 2 3 4 5 6 7 8 9; do echo o$n; echo e$n >&2; done'",
    "output, then a signal": "exec $RUN sh -c 'echo before; kill -KILL $$'",
    "dup to stderr": "exec $RUN sh -c 'echo x 1>&2'",
    "dup to stdout": "exec $RUN sh -c 'ls /nonexistent 2>&1 >/dev/null | wc -l'",
    "/dev/stdout": "exec $RUN sh -c 'echo a > /dev/stdout'",
    "/dev/stderr": "exec $RUN sh -c 'echo a > /dev/stderr'",
    "stdout closed": "exec $RUN sh -c 'exec >&-; echo lost 2>/dev/null; echo $? >&2'",
    "stderr closed": "exec $RUN sh -c 'exec 2>&-; echo still here'",
    "from the background": "exec $RUN sh -c '(echo a; echo b >&2) & wait; echo c'",
    "two writers": "exec $RUN sh -c 'seq 100 & wait; seq 100'",
    "no terminal": "exec $RUN sh -c 'test -t 0 || test -t 1 || test -t 2; echo $?'",
    "into a file": "$RUN echo kept > out.txt; cat out.txt",
    "errors into a file": "$RUN sh -c 'echo kept >&2' 2> err.txt; cat err.txt",
    "both into one file": "$RUN sh -c 'echo a; echo b >&2' > both.txt 2>&1; sort both.txt",
    "in backquotes": "x=$($RUN printf 'a b\\n\\n'); echo \"[$x]\"",
    "through a pipe": "$RUN seq 1000 | tail -1",
    "a reader that goes": "$RUN yes | head -1",
    "a reader that goes late": "$RUN seq 100000 | head -5000 | tail -1",
}
INPUT = {
    "nothing": "$RUN cat < /dev/null",
    "an empty pipe": "printf '' | $RUN cat",
    "one byte": "printf x | $RUN cat",
    "lines": "seq 5 | $RUN cat",
    "lines and an end": "seq 5 > five; exec $RUN sh -c 'cat; echo bad >&2; kill -TERM $$' < five",
    "every byte": "python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(256)))' | $RUN cat",
    "a file": "seq 1000 > in.txt; $RUN wc -l < in.txt",
    "the rest of a file": "seq 10 > in.txt; { read a; $RUN cat; } < in.txt",
    "here document": "$RUN cat <<END\na\n  b\nEND",
    "ten megabytes": "head -c 10000000 /dev/zero | tr '\\0' 'x' | $RUN sha256sum",
    "ten megabytes both ways": "seq 1400000 | $RUN cat | sha256sum",
    "counted": "head -c 1234567 /dev/zero | $RUN wc -c",
    "one line of many": "seq 100000 | $RUN head -1",
    "a reader that reads nothing": "seq 100000 | $RUN true; echo $?",
    "yes": "yes | $RUN head -3",
    "yes, and its own end": "(yes; echo $? >&2) | $RUN head -1",
    "closed by the reader": "yes | $RUN sh -c 'exec 0<&-; echo closed'",
    "read a line, then another": "seq 3 | $RUN sh -c 'read a; read b; echo $b $a'",
    "read line by line": "printf 'a b\\nc d\\n' | $RUN sh -c 'while read x y; do echo $y $x; done'",
    "no newline at the end": "printf 'a\\nb' | $RUN sh -c 'while read x; do echo [$x]; done; echo [$x]'",
    "/dev/stdin": "echo abc | $RUN cat /dev/stdin",
    "a script on stdin": "echo 'echo from a script; exit 4' | $RUN sh; echo $?",
    "python on stdin": "echo 'print(6 * 7)' | $RUN python3 -",
    "shared with a child": "seq 4 | $RUN sh -c 'read a; cat; echo $a'",
    "slowly": "(echo a; sleep 0.2; echo b) | $RUN cat",
    "through three": "seq 100 | $RUN grep 7 | $RUN wc -l",
    "sorted": "printf 'c\\na\\nb\\n' | $RUN sort",
    "tee": "echo x | $RUN tee tee.txt; cat tee.txt",
    "a late reader": "seq 50000 | $RUN sh -c 'sleep 0.3; tail -1'",
    "compressed": "seq 10000 | gzip -c | $RUN gzip -dc | tail -1",
}
WORDS = {
    "spaces": "exec $RUN printf '[%s]' 'a b' '  c  ' ' '",
    "an empty word": "exec $RUN printf '[%s]' '' a ''",
    "newlines": "exec $RUN printf '[%s]' 'a\nb' '\n'",
    "tabs": "exec $RUN printf '[%s]' 'a\tb'",
    "single quotes": "exec $RUN printf '[%s]' \"it's\"",
    "double quotes": "exec $RUN printf '[%s]' 'say \"x\"'",
    "globs": "exec $RUN printf '[%s]' '*' '?' '[a-z]' '~' '{a,b}'",
    "dollars": "exec $RUN printf '[%s]' '$HOME' '$(id)' '`id`' '${x}'",
    "backslashes": "exec $RUN printf '[%s]' '\\' '\\\\' 'a\\nb' '\\t'",
    "operators": "exec $RUN printf '[%s]' '|' '&&' ';' '>' '<' '&' '!' '#' 2>/dev/null",  # there is a hint on stderr
    "leading dashes": "exec $RUN printf '[%s]' -- -n --help -x --node n9",
    "a lone dash": "exec $RUN printf '[%s]' - --",
    "not UTF-8": "exec $RUN printf '[%s]' \"$(printf 'a\\377b')\"",
    "UTF-8": "exec $RUN printf '[%s]' 'ä€𝄞' '日本'",
    "control characters": "exec $RUN printf '[%s]' \"$(printf 'a\\001\\033b')\"",
    "percent signs": "exec $RUN echo '%s %d %%'",
    "equals signs": "exec $RUN echo A=b --c=d",
    "a long word": "exec $RUN sh -c 'printf %s \"$1\" | wc -c' sh \"$(head -c 100000 /dev/zero | tr '\\0' 'y')\"",
    "many words": "exec $RUN sh -c 'echo $#' sh $(seq 2000)",
    "a script in a word": "exec $RUN python3 -c 'import sys\nfor word in sys.argv[1:]:\n    print(repr(word))' a 'b c'",
    "a command with a space": "printf '#!/bin/sh\\necho ran $1\\n' > 'my tool'; chmod +x 'my tool'; exec $RUN './my tool' x",
}
SURROUNDINGS = {
    "a variable": "MY_WORD='a b' $RUN sh -c 'echo \"$MY_WORD\"'",
    "an empty variable": "MY_WORD= $RUN sh -c 'echo \"[${MY_WORD-unset}]\"'",
    "an unset variable": "unset MY_WORD; $RUN sh -c 'echo \"[${MY_WORD-unset}]\"'",
    "a variable that is not UTF-8": "MY_WORD=\"$(printf 'a\\377')\" $RUN sh -c 'printf %s \"$MY_WORD\"'",
    "a variable with newlines": "MY_WORD='a\nb' $RUN sh -c 'echo \"$MY_WORD\"'",
    "PATH": "exec $RUN sh -c 'echo $PATH'",
    "HOME": "exec $RUN sh -c 'echo $HOME'",
    "LANG": "LANG=C.UTF-8 LC_ALL=C $RUN sh -c 'echo $LANG $LC_ALL'",
    "the directory": "exec $RUN pwd",
    "another directory": "mkdir -p sub; cd sub; exec $RUN pwd",
    "a directory with a space": "mkdir -p 'a b'; cd 'a b'; exec $RUN pwd",
    "a relative path": "echo x > rel.txt; exec $RUN cat rel.txt",
    "a program here": "printf '#!/bin/sh\\necho here\\n' > tool; chmod +x tool; exec $RUN ./tool",
    "the umask": "umask 027; exec $RUN sh -c umask",
    "the umask of files": "umask 077; rm -f made; $RUN touch made; stat -c %a made",
    "the user": "exec $RUN id -u",
    "the groups": "exec $RUN id -G",
    "descriptors": "exec $RUN sh -c 'ls /proc/self/fd | wc -l'",
    "signals that are ignored": "exec $RUN sh -c 'grep SigIgn /proc/self/status | tail -c 8'",
    "signals that are blocked": "exec $RUN sh -c 'grep SigBlk /proc/self/status'",
    "the core limit": "exec $RUN sh -c 'ulimit -s'",
    "it writes where we are": "$RUN sh -c 'echo made > made.txt'; cat made.txt",
}
TOLD = {
    "not found": "exec $RUN no-such-command-at-all",
    "not found by its path": "exec $RUN /no/such/command",
    "not executable": ": > plain; chmod 644 plain; exec $RUN ./plain",
    "a directory": "exec $RUN /tmp",
}
CASES = {
    f"{table}: {name}": line
    for table, lines in {
        "exit": EXIT_CODES,
        "signal": SIGNALS,
        "output": OUTPUT,
        "input": INPUT,
        "word": WORDS,
        "around": SURROUNDINGS,
    }.items()
    for name, line in lines.items()
}


@pytest.fixture(scope="module", name="agent")
def fixture_agent() -> Iterator[Agent]:
    """n1, from which everything is run on n2."""
    with Cluster() as cluster:
        home, _ = cluster.linked(2, slots=8)
        yield home


@pytest.fixture(scope="module", name="tool")
def fixture_tool(agent: Agent) -> str:
    """A command that runs another one on n2."""
    path = agent.cluster.directory / "elsewhere"
    words = " ".join(map(shlex.quote, program()))
    path.write_text(f'#!/bin/sh\nexec {words} run --node n2 "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _result(line: str, directory: Path, agent: Agent, run: str) -> tuple[int, bytes, bytes]:
    """Exit status as a shell shows it, stdout and stderr."""
    directory.mkdir()
    here = directory / "here"  # the same name for both: commands may print it
    here.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=here,
        env={**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, "RUN": run, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    stdout, stderr = (
        without_waits(raw).replace(os.fsencode(directory), b"DIRECTORY") for raw in (done.stdout, done.stderr)
    )
    return code, stdout, stderr


@pytest.mark.parametrize("name", in_short(CASES, 8))
def test_it_is_as_it_would_be_here(name: str, agent: Agent, tool: str, tmp_path: Path) -> None:
    here = _result(CASES[name], tmp_path / "local", agent, "")
    there = _result(CASES[name], tmp_path / "remote", agent, tool)
    assert there == here


@pytest.mark.parametrize("name", TOLD)
def test_what_cannot_be_executed_has_the_exit_code_of_a_shell(
    name: str, agent: Agent, tool: str, tmp_path: Path
) -> None:
    here = _result(TOLD[name], tmp_path / "local", agent, "")
    there = _result(TOLD[name], tmp_path / "remote", agent, tool)
    assert there[:2] == here[:2]
    assert there[2].startswith(b"peerload: n1/")


def test_nothing_of_all_this_is_left(agent: Agent) -> None:
    wait_until(lambda: all(state in {"done", "failed", "cancelled"} for state in agent.states().values()))
    for one in agent.cluster.agents.values():
        wait_until(lambda one=one: not list((one.state / "spool").glob("*.in*")), what="inputs to be dropped")  # type: ignore[misc]
