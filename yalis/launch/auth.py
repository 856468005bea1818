"""The handshake of every connection between ranks: both sides prove that they know the job's secret.

    connecting side                                   accepting side
    HELLO  method, nonce [, MUNGE credential]  -->
                                               <--    REPLY  nonce, proof [, MUNGE credential]
    PROOF  proof                               -->

Frames have a fixed size (a credential at most 2 KiB). A proof is the HMAC-SHA256, under the secret, of the side's
role, the job, the purpose of the connection, the address of the accepting side and both nonces. The secret is not
sent. The address prevents a process at another address or port from relaying the handshake between two ranks.

With MUNGE, a rank that has no secret yet asks for it in HELLO, and REPLY contains it in a credential that only
this user can decode.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from yalis.launch.link import plain_address

HANDSHAKE_S = 10.0  # after which an unauthenticated connection is closed
_MAGIC = b"YALIS\0\0\1"
_HELLO = struct.Struct(">8sBxH32s")  # magic, method, bytes of the credential, nonce
_REPLY = struct.Struct(">8sBBH32s32s")  # magic, status, method, bytes of the credential, nonce, proof
_NONCE_BYTES = PROOF_BYTES = 32
MAX_CREDENTIAL = 2048  # bytes; the MUNGE credentials exchanged here have about 500
_OK, _OTHER_METHOD = 0, 1
_CONNECTING, _ACCEPTING = b"connecting", b"accepting"
_REQUEST, _ANSWER = b"yalis secret request", b"yalis secret answer"


class Method(IntEnum):
    """How the ranks of a job get its secret. The values are sent in frames."""

    GIVEN = 1
    MPI = 2
    HOST_FILE = 3
    MUNGE = 4
    HOME_FILE = 5
    INSECURE = 6

    def __str__(self) -> str:
        return _METHOD_NAMES[self]


_METHOD_NAMES = {
    Method.GIVEN: "YALIS_SECRET",
    Method.MPI: "MPI broadcast",
    Method.HOST_FILE: "a file on the host",
    Method.MUNGE: "MUNGE",
    Method.HOME_FILE: "a file in the home directory",
    Method.INSECURE: "insecure_rendezvous=True",
}


class HandshakeError(Exception):
    """The peer is not a rank of this job, or uses another method.

    The message has no subject: "does not know the job's secret" follows "the process at ADDRESS".
    """


class JobKey(NamedTuple):
    """What a rank needs to prove that it is a rank of a job."""

    method: Method
    job: str
    secret: bytes

    def __repr__(self) -> str:
        return f"JobKey({self.method}, {self.job!r})"  # without the secret, which must not appear in a log

    def proof(self, role: bytes, purpose: bytes, address: bytes, nonces: bytes) -> bytes:
        parts = (b"yalis", role, self.job.encode(errors="surrogateescape"), purpose, address, nonces)
        return hmac.digest(self.secret, b"".join(struct.pack(">I", len(part)) + part for part in parts), "sha256")


class Responder:
    """The accepting side of one handshake, without I/O: call receive() with `frame_size` bytes until `done`."""

    def __init__(self, key: JobKey, purpose: bytes, sock: socket.socket) -> None:
        self.frame_size, self.done = _HELLO.size, False
        self._key, self._purpose, self._address = key, purpose, _encode_address(sock.getsockname())
        self._nonces = b""
        self._handle: Callable[[bytes], bytes] = self._handle_hello

    def receive(self, frame: bytes) -> bytes:
        """Handle the next frame. Returns the bytes to send, or raises HandshakeError."""
        return self._handle(frame)

    def _handle_hello(self, frame: bytes) -> bytes:
        magic, method, length, nonce = _HELLO.unpack(frame)
        if magic != _MAGIC or method not in _METHOD_NAMES:
            raise HandshakeError("is not a rank of this version of yalis")
        if method != self._key.method:
            error = MethodMismatch(Method(method), self._key.method)
            error.reply = _REPLY.pack(_MAGIC, _OTHER_METHOD, self._key.method, 0, bytes(32), bytes(32))
            raise error
        self._nonces = nonce + secrets.token_bytes(_NONCE_BYTES)
        if not length:
            return self._reply(b"")
        if method != Method.MUNGE or length > MAX_CREDENTIAL:
            raise HandshakeError("sent a frame of a wrong size")
        self.frame_size, self._handle = length, self._handle_credential
        return b""

    def _handle_credential(self, credential: bytes) -> bytes:
        from yalis.launch import munge  # loads ctypes

        try:
            payload = munge.decode(credential)
            if not hmac.compare_digest(payload, _request(self._key.job, self._nonces[:_NONCE_BYTES])):
                raise HandshakeError("asked for the secret of another job")
            return self._reply(munge.encode(_ANSWER + self._nonces + self._key.secret))
        except munge.MungeError as error:
            raise HandshakeError(f"sent a MUNGE credential that was refused ({error})") from error

    def _reply(self, credential: bytes) -> bytes:
        self.frame_size, self._handle = PROOF_BYTES, self._handle_proof
        proof = self._key.proof(_ACCEPTING, self._purpose, self._address, self._nonces)
        nonce = self._nonces[_NONCE_BYTES:]
        return _REPLY.pack(_MAGIC, _OK, self._key.method, len(credential), nonce, proof) + credential

    def _handle_proof(self, frame: bytes) -> bytes:
        expected = self._key.proof(_CONNECTING, self._purpose, self._address, self._nonces)
        if not hmac.compare_digest(frame, expected):
            raise HandshakeError("does not know the job's secret")
        self.done, self.frame_size = True, 0
        return b""


class MethodMismatch(HandshakeError):
    """The two sides get the secret by different methods."""

    reply = b""  # what the accepting side sends before it closes the connection

    def __init__(self, theirs: Method, own: Method) -> None:
        super().__init__(f"gets the job's secret from {theirs}, and this rank from {own}")
        self.theirs = theirs


def authenticate(
    sock: socket.socket,
    method: Method,
    job: str,
    secret: bytes | None,
    purpose: bytes,
    timeout: float = HANDSHAKE_S,
) -> JobKey:
    """Run the connecting side of the handshake on a connected socket. Returns the job's key.

    If `secret` is None (MUNGE only), the accepting side is asked for it. Raises HandshakeError or OSError.
    """
    deadline = time.monotonic() + timeout
    nonce = secrets.token_bytes(_NONCE_BYTES)
    credential = _ask_for_secret(job, nonce) if secret is None else b""
    sock.settimeout(timeout)
    sock.sendall(_HELLO.pack(_MAGIC, method, len(credential), nonce) + credential)
    magic, status, their_method, length, their_nonce, proof = _REPLY.unpack(_read_exactly(sock, _REPLY.size, deadline))
    if magic != _MAGIC or their_method not in _METHOD_NAMES:
        raise HandshakeError("is another program or another version of yalis")
    if status != _OK or their_method != method:
        raise MethodMismatch(Method(their_method), method)
    if length > MAX_CREDENTIAL or (length > 0) != (secret is None):
        raise HandshakeError("sent a frame of a wrong size")
    nonces = nonce + their_nonce
    if secret is None:
        secret = _read_secret(_read_exactly(sock, length, deadline), nonces)
    key = JobKey(method, job, secret)
    address = _encode_address(sock.getpeername())
    if not hmac.compare_digest(proof, key.proof(_ACCEPTING, purpose, address, nonces)):
        raise HandshakeError("does not know the job's secret")
    sock.sendall(key.proof(_CONNECTING, purpose, address, nonces))
    return key


def _ask_for_secret(job: str, nonce: bytes) -> bytes:
    """Return the MUNGE credential that asks the accepting side for the secret."""
    from yalis.launch import munge  # loads ctypes

    try:
        return munge.encode(_request(job, nonce))
    except munge.MungeError as error:
        raise HandshakeError(f"could not be asked for the secret ({error})") from error


def _read_secret(credential: bytes, nonces: bytes) -> bytes:
    """Return the secret in the MUNGE credential that answers `_ask_for_secret`."""
    from yalis.launch import munge  # loads ctypes

    try:
        payload = munge.decode(credential)
    except munge.MungeError as error:
        raise HandshakeError(f"sent a MUNGE credential that was refused ({error})") from error
    if not payload.startswith(_ANSWER + nonces):
        raise HandshakeError("answered another request")
    return payload[len(_ANSWER + nonces) :]


def _request(job: str, nonce: bytes) -> bytes:
    return _REQUEST + hashlib.sha256(job.encode(errors="surrogateescape")).digest() + nonce


def _encode_address(name: tuple[object, ...]) -> bytes:
    return f"{plain_address(str(name[0]))} {name[1]}".encode()


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        received = sock.recv(size - len(data))
        if not received:
            raise HandshakeError("closed the connection")
        data += received
    return data
