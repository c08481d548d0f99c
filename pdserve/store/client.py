"""The connection to redis: time-outs, retries, error translation, scripts. Knows nothing of workers or requests.

Commands stay within redis 6.2. RESP2 is pinned: every server and proxy speaks it, and the replies we use are the same.
Values are read as bytes, because what other clients wrote under our names need not be text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import AsyncScript
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from pdserve.errors import ConfigError, StoreError
from pdserve.store.keys import META_TTL_MS, SCHEMA_VERSION, Keyspace
from pdserve.store.login import StoreLogin

MAX_CONNECTIONS: Final = 16
"""Sockets per process. Calls beyond that wait for one, within their time-out."""

NUM_RETRIES: Final = 2
"""Tries after a broken connection (a restarted server, a failover); a time-out is never retried, its time is spent."""

LUA_TOUCH_META: Final = """
-- Create or refresh the meta hash: ARGV-free helper shared by scripts. Returns stored schema and generation.
local function touch_meta(key, schema, generation, ttl_ms)
  if redis.call('TYPE', key).ok ~= 'hash' then
    redis.call('DEL', key)
    redis.call('HSET', key, 'schema', schema, 'generation', generation)
  end
  redis.call('PEXPIRE', key, ttl_ms)
  local found = redis.call('HMGET', key, 'schema', 'generation')
  return found[1] or '', found[2] or ''
end
"""

_LUA_CHECK_SCHEMA: Final = (
    LUA_TOUCH_META
    + """
-- KEYS: meta. ARGV: our schema, new generation, TTL in ms. Returns {schema, generation}.
local schema, generation = touch_meta(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
return {schema, generation}
"""
)


class WrongTypeError(StoreError):
    """The key holds a value of another redis type: not something we wrote."""


def require_shared(url: str) -> None:
    """Raises ConfigError for `embedded`: only the commands that start a whole cluster start a server with it."""
    if url == "embedded":
        raise ConfigError(
            "store.url: a process of its own needs a redis that others reach too; give redis://host:port "
            "(`embedded` is for `pdserve up` and `pdserve demo`)",
            field="store.url",
        )


def display_url(url: str) -> str:
    """`url` without user, password and query: fit for logs and errors."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One script with its keys and arguments, to be sent with others in one round trip."""

    script: AsyncScript
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


class Store:
    """One process's connection to the redis of its deployment. All methods raise StoreError and nothing of redis-py."""

    def __init__(self, url: str, cluster: str, *, timeout_s: float, login: StoreLogin | None = None) -> None:
        """Check the arguments; no I/O. Raises ConfigError naming `store.url` or `cluster`.

        `timeout_s` bounds each call as a whole: getting a connection, connecting, retries and the answer.
        `login` is what the URL does not say.
        """
        self.keys = Keyspace(cluster)
        self.url = display_url(url)
        """Where redis is, without credentials."""
        self._timeout_s = timeout_s
        self._redis = _client(url, self.url, login or StoreLogin())
        # Calls beyond the pool's size wait here; the pool itself would refuse them.
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._check_schema = self.script(_LUA_CHECK_SCHEMA)

    @classmethod
    async def connect(cls, url: str, cluster: str, *, timeout_s: float = 2.0, login: StoreLogin | None = None) -> Self:
        """A store that has answered once and whose schema this version understands.

        Raises ConfigError for a bad URL, StoreError if redis does not answer within `timeout_s`, refuses us, or holds
        a newer schema.
        """
        store = cls(url, cluster, timeout_s=timeout_s, login=login)
        try:
            await store.ping()
            await store._require_schema()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def aclose(self) -> None:
        """Close every connection. The store cannot be used afterwards."""
        with contextlib.suppress(TimeoutError):  # A frozen peer with unsent data: the sockets die with the process.
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()

    async def ping(self) -> None:
        """Return if redis answers."""
        await self.command("PING")

    async def command(self, *args: str | bytes | int) -> Any:
        """Run one command and return its reply with byte strings."""
        async with self._translated(str(args[0])):
            return await self._redis.execute_command(*args)  # type: ignore[no-untyped-call]

    async def commands(self, calls: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Run commands in one round trip, not as a transaction. A reply that is an error becomes a StoreError in its
        place in the list; only the loss of the whole batch raises."""
        if not calls:
            return []
        async with self._translated(f"{len(calls)} x {calls[0][0]!s}"), self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*call)
            replies = await pipe.execute(raise_on_error=False)
        return [self._as_reply(reply) for reply in replies]

    def script(self, lua: str) -> AsyncScript:
        """Prepare a script for EVALSHA. It is loaded when a server does not know it. No I/O."""
        return self._redis.register_script(lua)

    async def run(self, script: AsyncScript, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run one script and return its reply."""
        async with self._translated("EVALSHA"):
            return await script(keys=list(keys), args=list(args))

    async def run_many(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts in one round trip, and those that the server does not know once more; errors as in
        `commands`."""
        if not calls:
            return []
        # Not through redis-py's scripts, whose pipelines ask in a round trip of its own whether they are known.
        async with self._translated(f"{len(calls)} x EVALSHA"), self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
            replies = await pipe.execute(raise_on_error=False)
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                replies[index] = await self.run(calls[index].script, calls[index].keys, calls[index].args)
        return [self._as_reply(reply) for reply in replies]

    async def keys_without_ttl(self) -> list[str]:
        """Keys of this deployment that would stay for ever, sorted. Walks the keyspace: not for hot paths."""
        async with self._translated("SCAN"):
            return await keys_without_ttl(self._redis, self.keys.prefix)

    def meta_args(self) -> tuple[str | bytes | int, ...]:
        """Arguments of `touch_meta` in LUA_TOUCH_META after the key: schema, a new generation, TTL in ms."""
        return (SCHEMA_VERSION, secrets.token_hex(8), META_TTL_MS)

    async def _require_schema(self) -> None:
        schema, _ = await self.run(self._check_schema, [self.keys.meta], self.meta_args())
        if not schema.isdigit():
            raise StoreError(
                f"redis at {self.url}: {self.keys.meta} holds no schema version of pdserve; use another cluster name "
                "or delete the key",
                url=self.url,
            )
        if int(schema) > SCHEMA_VERSION:
            raise StoreError(
                f"redis at {self.url}: deployment {self.keys.cluster!r} is used by a newer pdserve (schema "
                f"{int(schema)}, this version knows {SCHEMA_VERSION}); upgrade this process or change the cluster name",
                url=self.url,
            )

    def _as_reply(self, reply: Any) -> Any:
        return self._error("command", reply) if isinstance(reply, RedisError) else reply

    def _error(self, what: str, cause: Exception) -> StoreError:
        kind = WrongTypeError if str(cause).startswith("WRONGTYPE") else StoreError
        error = kind(f"redis at {self.url}: {what} failed: {cause or type(cause).__name__}", url=self.url)
        error.__cause__ = cause
        return error

    @asynccontextmanager
    async def _translated(self, what: str) -> AsyncIterator[None]:
        """Bound the body by the time-out, and turn what redis-py and the socket raise into StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                yield
        except TimeoutError as e:
            raise StoreError(
                f"redis at {self.url}: no answer to {what} within {self._timeout_s:g} s", url=self.url
            ) from e
        except (RedisError, OSError) as e:
            raise self._error(what, e) from e


async def keys_without_ttl(redis: Redis, prefix: str) -> list[str]:
    """Keys that start with `prefix` and have no TTL, sorted. `prefix` is literal."""
    pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in prefix) + "*"
    found: set[str] = set()
    cursor = 0
    while True:
        cursor, keys = await redis.scan(cursor, match=pattern, count=1000)
        if keys:
            pipe = redis.pipeline(transaction=False)
            for key in keys:
                pipe.pttl(key)
            ttls = await pipe.execute()
            # -1 is "no TTL"; -2 is a key that has expired since the scan.
            found.update(_text(key) for key, ttl in zip(keys, ttls, strict=True) if ttl == -1)
        if cursor == 0:
            return sorted(found)


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


def _client(url: str, shown: str, login: StoreLogin) -> Redis:
    """A client with its pool. Raises ConfigError for a URL that redis-py does not take."""
    if urlsplit(url).scheme not in {"redis", "rediss", "unix"}:
        raise ConfigError(
            f"store.url: must start with redis://, rediss:// or unix://, got {shown!r}", field="store.url"
        )
    url, provider = login.provider(url)
    try:
        pool = ConnectionPool.from_url(
            url,
            **login.tls_options(),
            credential_provider=provider,
            max_connections=MAX_CONNECTIONS,
            protocol=2,
            decode_responses=False,
            # Otherwise each connection looks for the version of the library in its files.
            driver_info=DriverInfo(),
            # The time-out of the whole call is the only one. With its own, redis-py sends through asyncio.wait_for,
            # which in Python 3.11 loses a cancellation, and so our time-out, that comes as the send completes.
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(
                ExponentialWithJitterBackoff(cap=0.5, base=0.05), NUM_RETRIES, supported_errors=(RedisConnectionError,)
            ),
        )
        # The pool checks its arguments only when it connects; a throw-away connection object checks them now.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as e:
        # The reason of the library may quote the URL with its password.
        raise ConfigError(
            f"store.url: {shown!r} is not a redis URL: port and database must be numbers, and the query may only have "
            "options of redis-py",
            field="store.url",
        ) from e
    return Redis.from_pool(pool)
