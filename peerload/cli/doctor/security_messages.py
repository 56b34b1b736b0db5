"""What `doctor --security` looks at of what is said: to brokers, and in the agent's own answers."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote, urlsplit

from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.cli.doctor.security_files import secrets


def brokers(facts: DoctorInput) -> list[str]:
    """Those configured, of the agent that runs or of one that would be started; with their passwords, if any are known."""
    told = (facts.checkup.get("broker") or {}).get("urls") or []
    return list(dict.fromkeys([*(facts.config.mqtt if facts.config is not None else ()), *told]))


def broker(facts: DoctorInput) -> Finding:
    """Whether what is said to brokers is encrypted, and whether they take anything from anybody."""
    from peerload.cli.doctor.broker import Way, anybody_may_publish, probed

    urls = brokers(facts)
    if not urls:
        return Finding(SKIP, "no broker is configured: nodes tell each other")

    way = Way.of(facts)
    if not way.ca and not way.cluster_ca and any(url.startswith("mqtts://") for url in urls):
        return Finding(SKIP, "the certificate of the cluster's CA cannot be read: ask as its owner")
    for url in urls:
        why = probed(url, way).why if url.startswith("mqtts://") else ""
        if "certificate" in why and way.certificate is not None:
            return Finding(FAIL, f"{_where(url)}: {why}", "peerload doctor        how a broker gets one:  docs/mqtt.md")
    plain = [url for url in urls if not url.startswith("mqtts://")]
    for url in urls:
        if anybody_may_publish(url, way, facts):
            says = f"{_where(url)} lets anybody publish: messages are sealed, and can be withheld or delayed by anyone"
            fix = "have it ask for names and keep an ACL:  peerload cluster broker-certificate DIR --host NAME (docs/mqtt.md)"
            return Finding(WARN if _is_here(url) else FAIL, says, fix)
    if plain:
        says = f"the way to {_where(plain[0])} is not encrypted: user, password, topics and times can be read on it"
        return Finding(WARN if _is_here(plain[0]) else FAIL, says, "name it as  mqtts://HOST        how:  docs/mqtt.md")
    return Finding(OK, f"{_where(urls[0])} is spoken to over TLS, and takes nothing from anonymous clients")


def _where(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2] or "the broker"


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host.startswith("127.") or host in ("localhost", "::1")


@needs_agent
def secrets_in_answers(facts: DoctorInput) -> Finding:
    """Whether the agent tells a key, a token or a password to whoever may ask."""
    told = json.dumps([facts.info, facts.nodes, facts.checkup, facts.settings], default=repr)
    wanted = secrets(facts)
    words = facts.text(f"/proc/{facts.info['pid']}/cmdline") + "\0" + facts.text(f"/proc/{facts.info['pid']}/environ")
    for url in (*brokers(facts), *re.findall(r"mqtts?://[^\0\s,]+", words)):
        password = urlsplit(url).password
        if password:
            wanted["a broker's password"] = unquote(password)
    found = [what for what, secret in wanted.items() if secret in told]
    if found:
        return Finding(FAIL, f"the agent's answers hold {found[0]}", "change it, and please report it")
    return Finding(OK, "no key, token or password is in the agent's answers")


def was_asked(facts: DoctorInput) -> Finding:
    """Whether there was an agent to look at."""
    if not facts.info:
        return Finding(FAIL, str(facts.agent_error or "no agent is running here"), "peerload up")
    if not facts.security:
        return Finding(
            FAIL, f"the agent is of version {facts.info.get('version')} and cannot tell", "peerload down ; peerload up"
        )
    return Finding(OK, f"node {facts.info.get('node')} was looked at, in {facts.security['mode']} mode")
