"""X.509 certificates of a cluster: its own CA, the nodes, and MQTT brokers.

All keys are Ed25519. A node's certificate names the node in the only entry (DNS) of its subjectAltName; its other names are not
used. Certificates are valid from a day before their creation, so that clocks may differ by that much.
"""

from __future__ import annotations

import hashlib
import ipaddress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

UNREADABLE = (
    *(UnsupportedAlgorithm, InternalError, TypeError),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
"""Exceptions of the library, in addition to ValueError, for malformed certificates, requests and keys."""
SKEW = timedelta(days=1)
CA_LIFE = timedelta(days=3650)
NODE_LIFE = timedelta(days=90)
BROKER_LIFE = timedelta(days=730)
BROKER_MARK = "peerload:broker"
"""A name in every broker certificate and in no node certificate."""
RENEWED_AT = 2 / 3
"""Fraction of a certificate's lifetime after which it is renewed."""


class KeyPair(NamedTuple):
    """A certificate and its key as PEM; a CA's key is empty on nodes without it."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "KeyPair(…)"


class CertificateInfo(NamedTuple):
    """Content of a certificate. name: the node (for a CA: the cluster's id); fingerprint: SHA-256 of the certificate; key: SHA-256 of
    its public key."""

    name: str
    valid_from: datetime
    valid_until: datetime
    fingerprint: str
    key: str = ""

    @property
    def issued_at(self) -> datetime:
        return self.valid_from + SKEW

    @property
    def due_at(self) -> datetime:
        return self.issued_at + (self.valid_until - self.issued_at) * RENEWED_AT


def make_ca(name: str, cluster_id: str, now: datetime) -> KeyPair:
    key = Ed25519PrivateKey.generate()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, f"peerload cluster {name}"),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, cluster_id),
        ]
    )
    builder = (
        _builder(subject, subject, key.public_key(), now - SKEW, now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    return KeyPair(builder.sign(key, None).public_bytes(Encoding.PEM), _key_pem(key))


def new_key() -> bytes:
    return _key_pem(Ed25519PrivateKey.generate())


def issue(authority: KeyPair, node: str, now: datetime, life: timedelta = NODE_LIFE) -> KeyPair:
    key = Ed25519PrivateKey.generate()
    return KeyPair(certify(authority, node, key.public_key(), now, life), _key_pem(key))


def certify(authority: KeyPair, node: str, key: Ed25519PublicKey, now: datetime, life: timedelta = NODE_LIFE) -> bytes:
    """Make a certificate (PEM) for this node and key."""
    ca = _of_pem(authority.certificate)
    ca_key = private_key(authority.key)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    until = now + life
    if ca.not_valid_after_utc > now:  # a local cluster, which checks no dates, may have an expired CA
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
    return builder.sign(ca_key, None).public_bytes(Encoding.PEM)


def certify_broker(authority: KeyPair, hosts: Sequence[str], now: datetime) -> KeyPair:
    """Make a key and certificate for an MQTT broker at these names and addresses. Its purpose and BROKER_MARK, a second
    name, keep it from being used as a node's."""
    names = [*map(_general_name, hosts), x509.UniformResourceIdentifier(BROKER_MARK)]
    ca, ca_key = _of_pem(authority.certificate), private_key(authority.key)
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "MQTT broker")])
    builder = (
        _builder(subject, ca.subject, key.public_key(), now - SKEW, min(now + BROKER_LIFE, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return KeyPair(builder.sign(ca_key, None).public_bytes(Encoding.PEM), _key_pem(key))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _of_pem(certificate: bytes) -> x509.Certificate:
    """Parse a certificate (PEM). Raises ValueError, and nothing else, for any malformed bytes."""
    try:
        return x509.load_pem_x509_certificate(certificate)
    except UNREADABLE as error:
        raise ValueError("not a readable certificate") from error


def _of_der(certificate: bytes) -> x509.Certificate:
    """Parse a certificate (DER). Raises ValueError, and nothing else, for any malformed bytes."""
    try:
        return x509.load_der_x509_certificate(certificate)
    except UNREADABLE as error:
        raise ValueError("not a readable certificate") from error


def request(key: bytes, node: str) -> bytes:
    """Make a certificate request (PKCS #10, DER) for this key (PEM)."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(private_key(key), None)
    return made.public_bytes(Encoding.DER)


def requested_key(csr: bytes) -> Ed25519PublicKey:
    """The key of a certificate request, after a check of its signature; the rest of the request is ignored. Raises only ValueError,
    for any bytes."""
    try:
        found = x509.load_der_x509_csr(csr)
        key = found.public_key()
        if not isinstance(key, Ed25519PublicKey) or not found.is_signature_valid:
            raise ValueError("not a request by an Ed25519 key")
    except UNREADABLE as error:
        raise ValueError("not a request by an Ed25519 key") from error
    return key


def key_of(certificate: bytes) -> Ed25519PublicKey:
    """The key of a certificate (DER). Raises ValueError if it is not Ed25519."""
    key = _public_key(_of_der(certificate))
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not an Ed25519 key")  # noqa: TRY004 -- the input is wrong, not the caller
    return key


def _public_key(found: x509.Certificate) -> CertificatePublicKeyTypes:
    """The public key of a certificate. Raises ValueError if its kind is not supported."""
    try:
        return found.public_key()
    except UNREADABLE as error:
        raise ValueError("not an Ed25519 key") from error


def key_fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def der_of(certificate: bytes) -> bytes:
    return _of_pem(certificate).public_bytes(Encoding.DER)


def ca_info(authority: KeyPair) -> CertificateInfo:
    """Content of a CA's certificate. Raises ValueError if it is not a cluster's CA, or the key does not match."""
    ca = _of_pem(authority.certificate)
    ids = ca.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    if len(ids) != 1 or (authority.key and private_key(authority.key).public_key() != _public_key(ca)):
        raise ValueError("certificate and key do not belong together")
    return CertificateInfo(
        str(ids[0].value), ca.not_valid_before_utc, ca.not_valid_after_utc, ca.fingerprint(SHA256()).hex()
    )


def valid_until(certificate: bytes) -> datetime:
    return _of_pem(certificate).not_valid_after_utc


def verified_info(authority: KeyPair, certificate: bytes) -> CertificateInfo:
    """Verify a node's certificate (PEM) of this CA → its content. Raises ValueError."""
    ca = _of_pem(authority.certificate)
    found = _of_pem(certificate)
    try:
        found.verify_directly_issued_by(ca)
    except (InvalidSignature, *UNREADABLE) as error:
        raise ValueError("not a certificate of this cluster") from error
    return _facts(found)


def proven_info(certificate: bytes) -> CertificateInfo:
    """Content of a node's certificate (DER) that TLS has verified. Raises ValueError if it is not a node certificate."""
    return _facts(_of_der(certificate))


def _facts(found: x509.Certificate) -> CertificateInfo:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE as error:
        raise ValueError("not a node's certificate") from error
    match list(names):
        case [x509.DNSName(value=node)]:
            pass
        case _:
            raise ValueError("not a node's certificate")
    key = _public_key(found)
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not an Ed25519 key")  # noqa: TRY004 -- as above
    fingerprint = found.fingerprint(SHA256()).hex()
    return CertificateInfo(
        node, found.not_valid_before_utc, found.not_valid_after_utc, fingerprint, key_fingerprint(key)
    )


def private_key(pem: bytes) -> Ed25519PrivateKey:
    """Parse a private key (PEM). Raises ValueError if it is not Ed25519."""
    try:
        key = load_pem_private_key(pem, None)
    except UNREADABLE as error:  # TypeError: the key has a password
        raise ValueError("not an Ed25519 key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("not an Ed25519 key")  # noqa: TRY004 -- the input is wrong, not the caller
    return key


def private_key_pem(pem: bytes) -> bytes:
    """The private key (PEM) in a file that may also contain a certificate. Raises ValueError."""
    return _key_pem(private_key(pem))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey, valid_from: datetime, valid_until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid_from)
        .not_valid_after(valid_until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
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


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
