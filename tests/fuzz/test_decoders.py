"""Whatever turns bytes into values has a fuzz target, or a reason why nobody else writes those bytes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.fuzz.test_targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
READS = {
    "unpackb",
    "loads",
    "load_pem_x509_certificate",
    "load_der_x509_certificate",
    "load_der_x509_csr",
    "load_pem_private_key",
    "literal_eval",
    "load_verify_locations",
    "convert",
    "from_bytes",
}
"""What decodes, by the last word of its name; besides `decode` of a msgspec decoder, and `tomllib.load`."""
LAST = {*READS, "decode", "load"}
CALLED = re.compile(rf"\b({'|'.join(sorted(LAST))})\(")
OUR_OWN = "bytes of this very program, or of the kernel"
USERS_OWN = "the user's own file or words, read by that user's own command: it may fail, and says so"

DECODERS = {
    "assign/program.py:read_program": USERS_OWN,
    "files/manifest.py:_unpacked": "manifest",
    "files/snapshot.py:_Known.__init__": OUR_OWN,
    "agent/files/attempts.py:AttemptFiles.__init__": OUR_OWN,
    "agent/files/attempts.py:UserWork._serve": "user-work",
    "agent/files/attempts.py:decode": "user-work",
    "agent/files/attempts.py:_converted": "user-work",
    "files/as_user.py:_Agent.receive": OUR_OWN,
    "sim/recorded.py:PublicTrace._json_lines": USERS_OWN,
    "sim/service.py:read_class": USERS_OWN,
    "sim/energy_model.py:read_cases": "energy-cases",
    "sim/energy_model.py:_check_node": "energy-cases",
    "web/routes.py:_body": "web-body",
    "web/server.py:running": OUR_OWN,
    "agent/peers/membership.py:_read_addresses": "state",
    "security/certificates.py:_of_der": "certificate",
    "security/certificates.py:_of_pem": "cluster",
    "security/certificates.py:private_key": "certificate",
    "security/certificates.py:requested_key": "join-csr",
    "security/cluster_dir.py:read": "cluster",
    "agent/control/connection.py:LocalConnection._take_frames": "control-link",
    "agent/control/connection.py:request_number": "control-link",
    "model/task.py:variables_of": "environment",
    "agent/forwarding/request_router.py:MergedListing.read": "listing",
    "agent/systemd.py:_socket_answers": OUR_OWN,
    "security/invitations.py:Invitations.__init__": "state",
    "security/invitations.py:_exchange": "join-node",
    "security/invitations.py:_proven": "certificate",
    "agent/joining.py:JoiningNode.data_received": "join-door",
    "security/node_identity_file.py:read": "joined",
    "launcher/system/account_resolver.py:_validated": OUR_OWN,
    "agent/launcher/client.py:EventFrames._next": "launcher-event",
    "launcher/system/accounts.py:_settings": "users-policy",
    "launcher/record_log.py:whole_records": "exit-record",
    "launcher/server.py:AgentSocket._receive_first": "launcher-request",
    "launcher/server.py:AgentSocket._process": "launcher-request",
    "launcher/protocol.py:_maps": "launcher-request",
    "launcher/system/accounts.py:GuestIds.take": OUR_OWN,
    "agent/launcher/client.py:_environment": "environment",
    "agent/launcher/client.py:exit_of": "exit",
    "security/broker.py:BrokerTls.context": USERS_OWN,
    "agent/peers/connection.py:PeerConnection._take_frames": "peer-link",
    "agent/peers/connection.py:PeerConnection.get_buffer": "peer-link",
    "agent/sensors/nvml.py:GpuFaults._stored": "state",
    "agent/launcher/mps.py:MpsDaemons._read_status": "mps-keeper",
    "agent/energy.py:PowerControls._changed": "state",
    "agent/sensors/energy.py:EnergyStore.checkpoint": OUR_OWN,
    "energy/profile.py:decoded": "power-profile",
    "energy/profile.py:_reason": "power-profile",
    "agent/sensors/energy.py:EnergyStore.totals": OUR_OWN,
    "cli/demo/gpu_agent.py:PlayedNvml._machine": USERS_OWN,
    "config/loader.py:_file": "config",
    "agent/completion/completion_jobs.py:OutputSaver._noted": OUR_OWN,
    "config/loader.py:converted_value": "config",
    "config/loader.py:_plain": OUR_OWN,
    "config/loader.py:mistakes_in": "settings",
    "agent/store/reader.py:_submissions": "row",
    "security/tls.py:_context": "cluster",
    "security/revocation.py:TrustStore.__init__": "state",
    "security/revocation.py:TrustStore._verified": "trust",
    "client/connection.py:Protocol.receive_data": "frame",
    "client/submission.py:prepare": OUR_OWN,
    "environments/locks.py:_table": USERS_OWN,
    "client/call.py:outcome_in": "the outcome of the user's own function, from the task that it ran in",
    "client/function.py:_outcome": "the user's own function, within the task",
    "client/function.py:main": "the user's own function, within the task",
    "client/connection.py:_configured_socket": USERS_OWN,
    "cli/common/command.py:print_dry_run": OUR_OWN,
    "cli/verbs/join.py:install_lines": "what the installer of this very program has written down",
    "client/connection.py:AgentConnection._pid": OUR_OWN,
    "core/coordination/intake.py:SubmissionLog.shrink": OUR_OWN,
    "policy/preset.py:made": "preset",
    "policy/preset.py:why_not": "preset",
    "policy/preset.py:_why_no_value": "preset",
    "policy/preset.py:parsed": "preset",
    "sim/recorded.py:_json_rows": USERS_OWN,
    "wire/frame.py:_contents": "answer",
    "wire/frame.py:check_bounds": "answer",
    "wire/control.py:decode_answer": "answer",
    "wire/control.py:decode_request": "request",
    "wire/expected.py:_plain_text": "request",
    "model/timers.py:timer": "recording",
    "wire/frame.py:unpack": "frame",
    "wire/peer.py:_is_known": "gossip",
    "wire/peer.py:_without_unknown": "gossip",
    "wire/peer.py:decode_datagram": "gossip",
    "wire/peer.py:decode": "peer",
    "wire/recording.py:_frame_end": "recording",
    "wire/seal.py:Sealer.open": "sealed",
}
"""file:function → the target that tries it, or a reason."""


def decoders() -> set[str]:
    found: set[str] = set()
    for path in sorted((ROOT / "peerload").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not CALLED.search(source):
            continue
        tree = ast.parse(source)
        made = {
            ast.unparse(target)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if "Decoder" in ast.unparse(node.value)
        }
        _look(tree, path.relative_to(ROOT / "peerload").as_posix() + ":", made, found)
    return found


def _look(tree: ast.AST, name: str, made: set[str], found: set[str]) -> None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _look(node, f"{name}{'' if name.endswith(':') else '.'}{node.name}", made, found)
            continue
        if isinstance(node, ast.Call) and _last(node.func) in LAST and _reads(ast.unparse(node.func), made):
            found.add(name)
        _look(node, name, made, found)


def _last(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _reads(called: str, made: set[str]) -> bool:
    first, _, last = called.rpartition(".")
    if last == "decode":
        return first.startswith("msgspec.") or first in made
    if last == "load":
        return first == "tomllib"
    if last == "loads":
        return first in ("json", "tomllib", "msgpack", "cloudpickle")
    if last == "convert":
        return first == "msgspec"
    return last in READS and (last != "from_bytes" or first == "int")


def test_every_decoder_is_tried() -> None:
    known, found = set(DECODERS), decoders()
    assert not found - known, "these decode, and nobody tries them"
    assert not known - found, "these do not decode any more"


def test_what_tries_them_is_there() -> None:
    assert {name for name in DECODERS.values() if " " not in name} <= set(TARGETS)
