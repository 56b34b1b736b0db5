"""Access control of the web server: rights to view and to act.

Two secrets are in files that only their owner can read: `view.token` permits viewing, `token` also cancel, hold and
drain. A browser receives neither: it redeems a one-time code for a cookie, which is signed with the secret and so survives
a restart of the server. Users who can open the Unix socket may view.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

from peerload.model.bounded import BoundedDict
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from pathlib import Path

    from peerload.web.http import Request

CODES_MAX = 16
CODE_S = 120.0
SESSION_S = 12 * 3600.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN_BYTES_MAX = 200


class ViewerRight(enum.IntEnum):
    """Rights of a viewer."""

    NOTHING = 0
    LOOK = 1
    ACT = 2


NAMES = {ViewerRight.LOOK: "view.token", ViewerRight.ACT: "token"}


def secret_of(directory: Path, right: ViewerRight) -> str:
    """The secret for this right, created if absent. Raises PeerloadError if others could read or change it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / NAMES[right]
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return read_secret(directory, right, os.geteuid())


def read_secret(directory: Path, right: ViewerRight, uid: int) -> str:
    """The secret for this right in the directory of that user. Raises PeerloadError if others could read or change it."""
    path, found = directory / NAMES[right], ""
    place, why = directory, ""
    try:
        status = directory.lstat()
        if status.st_uid == uid and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077:
            place = path
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
                status = os.fstat(descriptor)
                if status.st_uid == uid and stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077:
                    found = file.read(TOKEN_BYTES_MAX).strip()
    except OSError as error:
        why = error.strerror or ""
    if not found:
        why = why or "others can read it, it belongs to another user, it is a link, or it is empty"
        raise PeerloadError(f"{place} cannot be trusted", why=why, hint=f"make it yours alone:  chmod go= {place}")
    if len(found) < 32:  # noqa: PLR2004 -- shorter than what is written above
        raise PeerloadError(f"{path} holds no token", hint=f"make another:  rm {path}")
    return found


class Access:
    """Access control of one server. ``hosts``: accepted host names, against DNS rebinding; ``cookie``: the
    name of its cookie, since browsers do not separate cookies by port; is_secure: clients use TLS."""

    def __init__(self, directory: Path, hosts: tuple[str, ...], cookie: str, *, is_secure: bool) -> None:
        self._secrets = {right: secret_of(directory, right) for right in NAMES}
        self._hosts = (*LOOPBACK_NAMES, *(host.lower() for host in hosts))
        self._cookie = cookie
        self._is_secure = is_secure
        self._codes: BoundedDict[str, tuple[float, ViewerRight]] = BoundedDict(CODES_MAX)

    def is_addressed(self, request: Request) -> bool:
        """True if the Host header names this server, not a foreign name that resolves to it."""
        return request.is_local or request.host in self._hosts

    def is_own_page(self, request: Request) -> bool:
        """True unless the browser reports that another site sent this request."""
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "same-origin")
        if origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").lower():
            return False
        return site in ("same-origin", "none")

    def right_of(self, request: Request) -> ViewerRight:
        scheme, _, word = request.headers.get("authorization", "").partition(" ")
        found = self.right_of_token(word.strip()) if scheme.lower() == "bearer" else self._of_cookie(request)
        return max(found, ViewerRight.LOOK if request.is_local else ViewerRight.NOTHING)

    def right_of_token(self, word: str) -> ViewerRight:
        given = word.encode("utf-8", "replace")
        rights = [right for right, own in self._secrets.items() if hmac.compare_digest(given, own.encode())]
        return max(rights, default=ViewerRight.NOTHING)

    def new_code(self, right: ViewerRight) -> str:
        code = secrets.token_urlsafe(24)
        self._codes[code] = time.monotonic() + CODE_S, right
        return code

    def take_code(self, code: str) -> ViewerRight:
        """Redeem a one-time code → the rights that it gives."""
        until_s, right = self._codes.pop(code, (0.0, ViewerRight.NOTHING))
        return right if until_s > time.monotonic() else ViewerRight.NOTHING

    def cookie_for(self, right: ViewerRight) -> tuple[str, str]:
        """The header with a cookie that grants this right."""
        words = f"{int(right)}.{int(time.time() + SESSION_S)}"
        value = f"{words}.{self._signature(right, words)}"
        secure = "; Secure" if self._is_secure else ""
        flags = f"Path=/; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict{secure}"
        return "Set-Cookie", f"{self._cookie}={value}; {flags}"

    def _of_cookie(self, request: Request) -> ViewerRight:
        for part in request.headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            words, _, signature = value.rpartition(".")
            number, _, until = words.partition(".")
            if name == self._cookie and number in ("1", "2") and until.isascii() and until.isdigit():
                right = ViewerRight(int(number))
                is_ours = hmac.compare_digest(
                    signature.encode("latin-1", "replace"), self._signature(right, words).encode()
                )
                return right if is_ours and int(until) > time.time() else ViewerRight.NOTHING
        return ViewerRight.NOTHING

    def _signature(self, right: ViewerRight, words: str) -> str:
        return hmac.new(self._secrets[right].encode(), f"cookie {words}".encode(), hashlib.sha256).hexdigest()
