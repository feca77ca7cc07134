"""One end of a TLS connection, by the system's OpenSSL. It can do things that ours never does."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import hmac
import os
import socket
import struct
from typing import Any

from pccl import _testing

TLS12, TLS13 = 0x0303, 0x0304
NEW_SESSION_TICKET, KEY_UPDATE = 4, 24  # types of handshake messages
_NAME = ctypes.util.find_library("ssl")
available = _NAME is not None
_VERIFY_PEER = 1
_HANDSHAKE = 22
_SUITES = {"TLS_AES_128_GCM_SHA256": 0x1301, "TLS_AES_256_GCM_SHA384": 0x1302}

_pointer = ctypes.c_void_p
_USE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _pointer,
    _pointer,
    ctypes.POINTER(_pointer),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(_pointer),
)
_FIND = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, ctypes.c_size_t, ctypes.POINTER(_pointer)
)
_MESSAGE = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_int, ctypes.c_int, _pointer, ctypes.c_size_t, _pointer, _pointer
)


def derive(secret: str, label: bytes) -> bytes:
    """The key for `label`, as docs/internals/protocol.md says."""
    root = hmac.digest(b"pccl secret", secret.encode(), "sha256")
    return hmac.digest(
        root, f"pccl {_testing.PROTOCOL_VERSION} ".encode() + label + b"\x01", "sha256"
    )


def control_key(secret: str) -> bytes:
    return derive(secret, b"control")


def link_key(secret: str, run: int, to: bytes) -> bytes:
    return derive(secret, b"link" + struct.pack("<Q", run) + to)


def run_id(sock: socket.socket, secret: str) -> int:
    """The id of the run of the master at the other end. It sees a newcomer that leaves again."""
    sample = _testing.control_sample("join")
    end = End(sock, client=True, key=control_key(secret))
    # Its envelope without a run, a term and an ordinal: what a newcomer says first.
    assert end.shake() and end.write(sample[:12] + bytes(20) + sample[32:])
    answer = end.read()
    end.free()
    return int(struct.unpack_from("<Q", answer, 16)[0])


PSK_KE, PSK_DHE_KE = b"\x00", b"\x01"  # modes of a key exchange


def client_hello(key: bytes, identity: bytes, modes: bytes, *, share: bool = True) -> bytes:
    """A record with a ClientHello that proves knowledge of `key`, by RFC 8446, section 4.2.11.

    OpenSSL never offers the mode psk_ke alone.
    """

    def sized(data: bytes, width: int = 2) -> bytes:
        return len(data).to_bytes(width, "big") + data

    def expanded(secret: bytes, label: bytes, context: bytes) -> bytes:
        info = struct.pack(">H", 32) + sized(b"tls13 " + label, 1) + sized(context, 1)
        return hmac.digest(secret, info + b"\x01", "sha256")

    extensions = {
        43: b"\x02\x03\x04",  # TLS 1.3
        10: sized(b"\x00\x1d"),  # X25519
        13: sized(b"\x04\x03\x08\x04"),
        45: sized(modes, 1),
    }
    if share:
        extensions[51] = sized(b"\x00\x1d" + sized(os.urandom(32)))
    binders = sized(sized(bytes(32), 1))
    known = sized(sized(identity) + bytes(4))
    extensions[41] = known + binders  # the last one
    body = b"\x03\x03" + os.urandom(32) + sized(b"", 1) + sized(b"\x13\x01") + sized(b"\x00", 1)
    body += sized(b"".join(struct.pack(">H", kind) + sized(e) for kind, e in extensions.items()))
    begin = (b"\x01" + sized(body, 3))[: -len(binders)]
    early = hmac.digest(bytes(32), key, "sha256")
    binder_key = expanded(early, b"ext binder", hashlib.sha256(b"").digest())
    finished = expanded(binder_key, b"finished", b"")
    binder = hmac.digest(finished, hashlib.sha256(begin).digest(), "sha256")
    return b"\x16\x03\x01" + sized(begin + sized(sized(binder, 1)))


def _library() -> Any:
    ssl = ctypes.CDLL(_NAME)
    for name in (
        "TLS_method",
        "SSL_CTX_new",
        "SSL_new",
        "SSL_SESSION_new",
        "SSL_CIPHER_find",
        "SSL_get_current_cipher",
        "EVP_PKEY_Q_keygen",
        "X509_new",
        "X509_getm_notBefore",
        "X509_getm_notAfter",
        "X509_gmtime_adj",
        "X509_get_subject_name",
        "X509_get_serialNumber",
        "EVP_sha256",
    ):
        getattr(ssl, name).restype = _pointer
    return ssl


class End:
    """An end of the connection `sock`, which stays the caller's.

    `messages` are the handshake messages seen: (whether it was ours, type).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        client: bool,
        key: bytes | None = None,
        identity: bytes = b"pccl control",
        suite: str = "TLS_AES_128_GCM_SHA256",
        version: int = TLS13,
        groups: str = "X25519",
        certificate: bool = False,
        early_data: int = 0,
    ) -> None:
        self._ssl = ssl = _library()
        self._key = key
        self._identity = identity
        self._suite = _SUITES.get(suite, 0x1301)
        self._early_data = early_data
        self._client = client
        self.messages: list[tuple[bool, int]] = []
        # A descriptor that blocks, but not for ever.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
        self._context = context = _pointer(ssl.SSL_CTX_new(_pointer(ssl.TLS_method())))
        self._control(context, 123, version)  # SSL_CTRL_SET_MIN_PROTO_VERSION
        self._control(context, 124, version)  # SSL_CTRL_SET_MAX_PROTO_VERSION
        assert ssl.SSL_CTX_set_ciphersuites(context, suite.encode())
        assert self._control(context, 92, 0, groups.encode())  # SSL_CTRL_SET_GROUPS_LIST
        # Kept: ctypes' functions live as long as the object.
        self._callbacks = (_USE(self._use), _FIND(self._find), _MESSAGE(self._seen))
        if key is not None:
            ssl.SSL_CTX_set_psk_use_session_callback(context, self._callbacks[0])
            ssl.SSL_CTX_set_psk_find_session_callback(context, self._callbacks[1])
        ssl.SSL_CTX_set_msg_callback(context, self._callbacks[2])
        if certificate:
            self._self_signed(context)
        self._end = _pointer(ssl.SSL_new(context))
        assert ssl.SSL_set_fd(self._end, sock.fileno())
        (ssl.SSL_set_connect_state if client else ssl.SSL_set_accept_state)(self._end)

    def _control(self, context: Any, command: int, number: int, text: bytes | None = None) -> int:
        ctrl = self._ssl.SSL_CTX_ctrl
        ctrl.restype = ctypes.c_long
        return int(ctrl(context, command, ctypes.c_long(number), text))

    def _session(self) -> int:
        ssl = self._ssl
        assert self._key is not None
        session = _pointer(ssl.SSL_SESSION_new())
        number = struct.pack(">H", self._suite)
        cipher = _pointer(ssl.SSL_CIPHER_find(self._end, number))
        ssl.SSL_SESSION_set1_master_key(session, self._key, ctypes.c_size_t(len(self._key)))
        ssl.SSL_SESSION_set_cipher(session, cipher)
        ssl.SSL_SESSION_set_protocol_version(session, TLS13)
        ssl.SSL_SESSION_set_max_early_data(session, ctypes.c_uint32(self._early_data))
        assert session.value is not None
        return session.value

    def _use(self, _ssl: Any, _hash: Any, identity: Any, size: Any, session: Any) -> int:
        self._told = ctypes.create_string_buffer(self._identity, len(self._identity))
        identity[0] = ctypes.addressof(self._told)
        size[0] = len(self._identity)
        session[0] = self._session()
        return 1

    def _find(self, _ssl: Any, identity: Any, size: int, session: Any) -> int:
        self.offered = ctypes.string_at(identity, size)
        session[0] = self._session()
        return 1

    def _seen(
        self, ours: int, _version: int, kind: int, data: int, size: int, *_unused: Any
    ) -> None:
        if kind == _HANDSHAKE and size > 0:
            self.messages.append((bool(ours), ctypes.string_at(data, 1)[0]))

    def _self_signed(self, context: Any) -> None:
        ssl = self._ssl
        key = _pointer(ssl.EVP_PKEY_Q_keygen(None, None, b"EC", b"P-256"))
        made = _pointer(ssl.X509_new())
        ssl.ASN1_INTEGER_set(_pointer(ssl.X509_get_serialNumber(made)), ctypes.c_long(1))
        ssl.X509_gmtime_adj(_pointer(ssl.X509_getm_notBefore(made)), ctypes.c_long(0))
        ssl.X509_gmtime_adj(_pointer(ssl.X509_getm_notAfter(made)), ctypes.c_long(86400))
        assert ssl.X509_set_pubkey(made, key)
        assert ssl.X509_sign(made, key, _pointer(ssl.EVP_sha256()))
        assert ssl.SSL_CTX_use_certificate(context, made)
        assert ssl.SSL_CTX_use_PrivateKey(context, key)

    def shake(self) -> bool:
        """Whether the handshake came to its end here."""
        return bool(self._ssl.SSL_do_handshake(self._end) == 1)

    def suite(self) -> str:
        """The name of the suite that both ends have agreed on."""
        name = self._ssl.SSL_CIPHER_get_name
        name.restype = ctypes.c_char_p
        found: bytes = name(_pointer(self._ssl.SSL_get_current_cipher(self._end)))
        return found.decode()

    def write(self, data: bytes) -> bool:
        return bool(self._ssl.SSL_write(self._end, data, len(data)) == len(data))

    def write_early(self, data: bytes) -> bool:
        put = ctypes.c_size_t()
        size = ctypes.c_size_t(len(data))
        return bool(self._ssl.SSL_write_early_data(self._end, data, size, ctypes.byref(put)) == 1)

    def early_data_was_accepted(self) -> bool:
        return bool(self._ssl.SSL_get_early_data_status(self._end) == 2)

    def read(self, most: int = 65536) -> bytes:
        """The bytes that have come; none at the end or after a failure."""
        data = ctypes.create_string_buffer(most)
        got = self._ssl.SSL_read(self._end, data, most)
        return data.raw[:got] if got > 0 else b""

    def free(self) -> None:
        self._ssl.SSL_free(self._end)
        self._ssl.SSL_CTX_free(self._context)
