"""X.509 as the cluster needs it: a CA of its own, and a certificate that says which node somebody is.

Everything is Ed25519. A node's certificate names it in one DNS entry of its subjectAltName, and nothing else in it is
believed. Certificates are valid from a day before they are made, so that clocks may differ by that much.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SKEW = timedelta(days=1)
CA_LIFE = timedelta(days=3650)
NODE_LIFE = timedelta(days=90)
RENEWED_AFTER = NODE_LIFE * 2 / 3


class Pair(NamedTuple):
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Pair(…)"


class Facts(NamedTuple):
    """What a certificate says: who it is for (a CA: the cluster's id), from when until when, and its SHA-256."""

    name: str
    valid_from: datetime
    valid_until: datetime
    fingerprint: str


def make_ca(name: str, cluster_id: str, now: datetime) -> Pair:
    """The certificate authority of a new cluster."""
    key = Ed25519PrivateKey.generate()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, f"peerload cluster {name}"),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, cluster_id),
        ]
    )
    builder = (
        _builder(subject, subject, key, now - SKEW, now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    return _pair(builder.sign(key, None), key)


def issue(authority: Pair, node: str, now: datetime) -> Pair:
    """A key and certificate for a node, to be used at both ends of its links."""
    ca = x509.load_pem_x509_certificate(authority.certificate)
    ca_key = _private_key(authority)
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    until = now + NODE_LIFE
    if ca.not_valid_after_utc > now:  # where it is not, no date is looked at: it is the local cluster's
        until = min(until, ca.not_valid_after_utc)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    builder = (
        _builder(subject, ca.subject, key, now - SKEW, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(node)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return _pair(builder.sign(ca_key, None), key)


def ca_facts(authority: Pair) -> Facts:
    """What a CA's certificate says. Raises ValueError if it is none of ours, or its key is another's."""
    ca = x509.load_pem_x509_certificate(authority.certificate)
    ids = ca.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    if len(ids) != 1 or _private_key(authority).public_key() != ca.public_key():
        raise ValueError("certificate and key do not belong together")
    return Facts(str(ids[0].value), ca.not_valid_before_utc, ca.not_valid_after_utc, ca.fingerprint(SHA256()).hex())


def node_facts(authority: Pair, certificate: bytes) -> Facts:
    """What a node's certificate of this CA says. Raises ValueError if it is none."""
    ca = x509.load_pem_x509_certificate(authority.certificate)
    found = x509.load_pem_x509_certificate(certificate)
    try:
        found.verify_directly_issued_by(ca)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, TypeError, x509.ExtensionNotFound) as error:
        raise ValueError("not a certificate of this cluster's") from error
    (node,) = names.get_values_for_type(x509.DNSName)
    return Facts(node, found.not_valid_before_utc, found.not_valid_after_utc, found.fingerprint(SHA256()).hex())


def _private_key(authority: Pair) -> Ed25519PrivateKey:
    key = load_pem_private_key(authority.key, None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("not an Ed25519 key")  # noqa: TRY004 -- the file's fault, not a caller's
    return key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PrivateKey,
    valid_from: datetime,
    valid_until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid_from)
        .not_valid_after(valid_until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: Ed25519PrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
