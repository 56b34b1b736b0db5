"""Notification delivery to one target, in a separate process with the rights of its user.

`python -E -P -m peerload.notification` reads the target and the facts from its environment, tries once, and prints the
outcome. A target is a URL (webhook), ``ntfy:TOPIC``, ``mail:ADDRESS``, or else a command, which is not delivered here.
The path of a URL is never printed, because it may be a secret.
"""

# ruff: noqa: PLC0415 -- the agent and the command line import only names of this file
from __future__ import annotations

import os
import re
import sys

TRY_S_MAX = 30
LATER = 75
"""Exit code: a retry may succeed (EX_TEMPFAIL); after any other code except 0 it will not."""
VARIABLES = ("TARGET", "SECRET_FILE", "SENDMAIL")
"""Variables PEERLOAD_NOTIFY_…: the target; a file with the secret that signs webhooks; the program for mail."""
SENDMAIL_PATH = "/usr/sbin:/usr/lib:/usr/local/sbin"
SECRET_BYTES_MAX = 4096
KINDS = {"https": "webhook", "http": "webhook", "ntfy": "ntfy", "mail": "mail"}
NTFY = "https://ntfy.sh"
_TOPIC = re.compile(r"(?:(https?://[^\s/]+|[a-z0-9.-]+(?::\d+)?)/)?([A-Za-z0-9_-]{1,64})\Z")
_ADDRESS = re.compile(r"[^\s@<>,;:\"\\-][^\s@<>,;:\"\\]*@[A-Za-z0-9.-]+\Z")
_MISSPELT = re.compile(r"([A-Za-z]+):\S+\Z")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(?:[/?][\x21-\x7e]*)?\Z")


def kind_of(target: str) -> str:
    """`webhook`, `ntfy` or `mail`; "" for a command."""
    return KINDS.get(target.partition(":")[0], "") if ":" in target else ""


def objection(target: str) -> str:
    """Reason why this is not a valid target; "" if it is one."""
    kind, rest = kind_of(target), target.partition(":")[2]
    if kind == "webhook" and not _URL.match(target):
        return "a URL is https://HOST/PATH, without a user and password"
    if kind == "ntfy" and not _TOPIC.match(rest):
        return "ntfy:TOPIC or ntfy:HOST/TOPIC, the topic of letters, digits, _ and - (at most 64)"
    if kind == "mail" and not _ADDRESS.match(rest):
        return "mail:NAME@HOST, one address"
    if not kind and (found := _MISSPELT.match(target)):
        from difflib import get_close_matches

        if near := get_close_matches(found[1].lower(), KINDS, 1, 0.7):
            return f"it would run as a command; did you mean  {near[0]}:… ?"
    return "" if target.strip() and "\0" not in target else "it is empty"


def shown(target: str) -> str:
    """The target without parts that may be secret: its host, or the kind of command."""
    kind, rest = kind_of(target), target.partition(":")[2]
    if kind == "webhook":
        return "webhook at " + re.split(r"[/?]", rest[2:])[0]
    if kind == "ntfy":
        return "ntfy at " + re.sub(r"^https?://", "", _server(rest))
    return f"mail to {rest}" if kind else "command"


def _server(rest: str) -> str:
    host = rest.rpartition("/")[0]
    return host if "://" in host else f"https://{host}" if host else NTFY


def main() -> int:
    """Deliver the notification in the environment → exit code."""
    import signal

    target = os.environ.get("PEERLOAD_NOTIFY_TARGET", "")
    facts = {
        name[9:].lower(): value
        for name, value in sorted(os.environ.items())
        if name.startswith("PEERLOAD_") and not name.startswith("PEERLOAD_NOTIFY_")
    }
    facts = {name: facts[name] for name in FACTS if name in facts}

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TRY_S_MAX)
    try:
        code, outcome = _mail(target, facts) if kind_of(target) == "mail" else _post(target, facts)
    except TimeoutError:
        code, outcome = LATER, f"no answer within {TRY_S_MAX} s"
    except OSError as error:
        code, outcome = LATER, error.strerror or str(getattr(error, "reason", "")) or type(error).__name__
    sys.stdout.write(f"{shown(target)}: {outcome}\n")
    return code


FACTS = (
    "event", "task_id", "name", "home", "user", "state", "exit_code", "signal", "reason", "node", "started_at", "ended_at",
    "members", "done", "failed", "cancelled",
)  # fmt: skip
"""Keys of a notification: the variables PEERLOAD_… in lower case."""


def _title(facts: dict[str, str]) -> str:
    what = facts.get("task_id") or f"node {facts.get('node', '')}"
    return " ".join(f"{what} {facts.get('name', '')} {facts.get('state', '')}".split())


def _post(target: str, facts: dict[str, str]) -> tuple[int, str]:
    import hashlib
    import hmac
    import json
    import urllib.error
    import urllib.request

    class Refuse(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            """Do not follow a redirect: it counts as an answer."""

    numbers = {name: float(facts[name]) for name in ("started_at", "ended_at") if facts.get(name)}
    body: dict[str, object] = {"v": 1, **facts, **numbers}
    if facts.get("exit_code"):
        body["exit_code"] = int(facts["exit_code"])
    headers = {"Content-Type": "application/json", "User-Agent": "peerload"}
    if kind_of(target) == "ntfy":
        topic = target.rpartition("/")[2].removeprefix("ntfy:")
        target = _server(target.partition(":")[2])
        failed = facts.get("state") in ("failed", "dead")
        message = facts.get("reason") or _title(facts)
        body = {"topic": topic, "title": _title(facts)[:200], "message": message[:2000], "priority": 4 if failed else 3}
    raw = json.dumps(body).encode()
    if path := os.environ.get("PEERLOAD_NOTIFY_SECRET_FILE"):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 -- a start without pathlib
                secret = file.read(SECRET_BYTES_MAX).strip()
        except OSError as error:
            return 1, f"the secret cannot be read: {error.strerror}"
        headers["X-Peerload-Signature"] = "sha256=" + hmac.new(secret, raw, hashlib.sha256).hexdigest()
    # The same for each delivery of a notification, because its receiver may get it more than once.
    headers["X-Peerload-Delivery"] = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    request = urllib.request.Request(target, raw, headers, method="POST")  # noqa: S310 -- http or https: `objection`
    try:
        with urllib.request.build_opener(Refuse).open(request, timeout=TRY_S_MAX) as answer:
            return 0, f"answered {answer.status}"
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:  # noqa: PLR2004 -- redirects
            return 1, f"answered {error.code}; redirects are not followed"
        return LATER if error.code >= 500 or error.code in (408, 425, 429) else 1, f"answered {error.code}"  # noqa: PLR2004
    except ValueError:
        return 1, "the URL is invalid"


def _mail(target: str, facts: dict[str, str]) -> tuple[int, str]:
    import email.message
    import shutil
    import subprocess

    program = os.environ.get("PEERLOAD_NOTIFY_SENDMAIL") or shutil.which("sendmail", path=SENDMAIL_PATH)
    if program is None:
        return 1, f"no sendmail in {SENDMAIL_PATH}"
    message = email.message.EmailMessage()
    message["To"] = address = target.partition(":")[2]
    message["Subject"] = f"[peerload] {_title(facts)}"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content("".join(f"{name}: {value}\n" for name, value in facts.items() if value))
    words = (program, "-i", "--", address)
    try:
        done = subprocess.run(  # noqa: S603 -- words, no shell
            words, input=bytes(message), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
    except OSError as error:
        return 1, f"{program} cannot be run: {error.strerror}"
    said = done.stderr[-200:].decode("utf-8", "backslashreplace").strip()
    return (0, "handed over") if done.returncode == 0 else (LATER, f"sendmail ended with {done.returncode} {said}")


if __name__ == "__main__":
    sys.exit(main())
