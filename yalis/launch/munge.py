"""MUNGE credentials: proof, by the cluster's munged daemons, of the user id that created a message.

A credential can be decoded only by processes of this user (and root) on hosts with the same MUNGE key.
"""

from __future__ import annotations

import ctypes
import os

from yalis import env

_LIBRARY = "libmunge.so.2"
_SOCKET, _UID_RESTRICTION = 8, 9  # munge_opt_t in munge.h


class MungeError(Exception):
    """libmunge is not installed, munged does not answer, or a credential is not valid."""


def encode(payload: bytes) -> bytes:
    """Return a credential that contains `payload` and that only this user can decode."""
    library = _load()
    context = _open_context(library)
    credential = ctypes.c_void_p()
    try:
        _check(library, library.munge_encode(ctypes.byref(credential), context, payload, len(payload)))
        return ctypes.string_at(credential)
    finally:
        library.munge_ctx_destroy(context)
        _free(credential)


def decode(credential: bytes) -> bytes:
    """Return the payload of a credential that a process of this user created."""
    library = _load()
    context = _open_context(library)
    payload, length, uid = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint32()
    try:
        _check(
            library,
            library.munge_decode(
                credential, context, ctypes.byref(payload), ctypes.byref(length), ctypes.byref(uid), None
            ),
        )
        if uid.value != os.geteuid():
            raise MungeError(f"the credential was created by user id {uid.value}, not {os.geteuid()}")
        return ctypes.string_at(payload, length.value)
    finally:
        library.munge_ctx_destroy(context)
        _free(payload)


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MungeError(f"{_LIBRARY} is not installed") from error
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.munge_ctx_create.restype = pointer
    library.munge_ctx_destroy.argtypes = [pointer]
    library.munge_encode.argtypes = [pointer, pointer, text, ctypes.c_int]
    library.munge_decode.argtypes = [text, pointer, pointer, pointer, pointer, pointer]
    library.munge_strerror.restype = text
    return library


def _open_context(library: ctypes.CDLL) -> ctypes.c_void_p:
    context = ctypes.c_void_p(library.munge_ctx_create())
    if not context:
        raise MemoryError("libmunge could not create a context")
    try:
        _check(library, library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint32(os.geteuid())))
        if path := env.munge_socket():
            _check(library, library.munge_ctx_set(context, _SOCKET, os.fsencode(path)))
    except BaseException:
        library.munge_ctx_destroy(context)
        raise
    return context


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise MungeError(library.munge_strerror(status).decode(errors="replace"))


def _free(pointer: ctypes.c_void_p) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(pointer)
