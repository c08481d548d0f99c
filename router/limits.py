"""Who a client is, and how many of its calls are in progress, whichever API they came by."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pdserve.errors import OverloadedError

RETRY_AFTER_S: Final = 1.0
"""Nobody knows when one of its calls ends; a second is long for a machine and short for people."""

_BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for a request that there may be."""

    name: bytes
    """See CallLimiter.name_of; requests are their `tenant`'s, which is such a name."""
    is_operator: bool = False
    """Whether it may know of everybody's requests that and where they are, and stop them: not what is in them."""


class CallLimiter:
    """Counts calls by client: its bearer token, or its network address if it sends none.

    Tokens are kept as keyed hashes, and only while a call of theirs is in progress. Where clients
    need keys, they have been verified before. Where they need none, a client that takes another token for every call
    escapes, to the bounds on connections and on all requests together.
    """

    def __init__(
        self,
        max_per_client: int | None,
        own_max: Callable[[str | None], int | None] | None = None,
        own_name: Callable[[str | None], str] | None = None,
        is_operator: Callable[[str | None], bool] | None = None,
    ) -> None:
        """None: no bound. `own_max` gives the one of a client's own, by its authorization, if it has one. `own_name` is
        given where clients need keys: the name of a key, by the authorization; `is_operator` tells whether it is one
        of an operator."""
        self._max = max_per_client
        self._own_max = own_max
        self._own_name = own_name
        self._is_operator = is_operator
        self._secret = secrets.token_bytes(32)
        self._calls: dict[bytes, int] = {}
        self.num_refused = 0

    @property
    def bounded(self) -> bool:
        """Whether anything is counted at all."""
        return self._max is not None or self._own_max is not None

    @property
    def names_are_sure(self) -> bool:
        """Whether nobody can take another client's name: where clients need keys."""
        return self._own_name is not None

    @property
    def num_clients(self) -> int:
        """Clients that have calls in progress and are counted."""
        return len(self._calls)

    @contextlib.contextmanager
    def call(self, authorization: str | None, peer: str) -> Iterator[None]:
        """Around one call. `authorization` is the header of that name, `peer` an address without the port.

        Raises OverloadedError if the client has as many calls in progress as it may have.
        """
        allowed = self._max
        if self._own_max is not None and (own := self._own_max(authorization)) is not None:
            allowed = own
        if allowed is None:
            yield
            return
        key = self.name_of(authorization, peer)
        num_calls = self._calls.get(key, 0)
        if num_calls >= allowed:
            self.num_refused += 1
            raise OverloadedError(
                f"{num_calls} requests of this client are in progress, and no more are allowed at once "
                "(router.max_requests_per_key, or the bound of its key)",
                retry_after_s=RETRY_AFTER_S,
            )
        self._calls[key] = num_calls + 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]

    def caller(self, authorization: str | None, peer: str) -> Caller:
        """Who calls. Arguments and errors as those of `name_of`."""
        is_operator = self._is_operator is not None and self._is_operator(authorization)
        return Caller(self.name_of(authorization, peer), is_operator)

    def name_of(self, authorization: str | None, peer: str) -> bytes:
        """A client's name: that of its key where clients need keys, which every router knows it by. Else one for as
        long as this process runs, the same for the same token, or the same address.

        Raises UnauthenticatedError if the key was revoked a moment ago.
        """
        if self._own_name is not None:
            return hashlib.blake2b(b"key " + self._own_name(authorization).encode(), digest_size=16).digest()
        if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
            named = "token " + authorization[len(_BEARER) :].strip()
        else:
            named = "peer " + peer
        return hashlib.blake2b(named.encode("utf-8", "surrogateescape"), key=self._secret, digest_size=16).digest()
