"""The prefill worker's end of KV hand-off: one `HandoffSender` per process, one link per decode process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.config import TransferConfig
from kv_transfer.counters import TransportCounters, TransportTotals
from kv_transfer.handoff import Handoff
from kv_transfer.hidden import hidden_tokens, sent_blocks
from kv_transfer.link import PrefillLink
from kv_transfer.plan import ChunkPlan
from kv_transfer.prefill_states import PrefillTimers
from kv_transfer.transports import TRANSPORTS, select
from kv_transfer.transports.base import TransportContext, TransportKind
from pdserve.errors import PdServeError, UnavailableError
from pdserve.kv_layout import KvBlockStore
from pdserve.kv_window import without
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import DecodeTarget, HandoffPurpose
from pdserve.worker_info import WorkerInfo

_CLOSE_TIMEOUT_S = 2.0
"""How long links may take to deliver their last messages."""

LinkLostCallback = Callable[[DecodeTarget, PdServeError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """Totals since start, and what is under way."""

    bytes_posted: int = 0
    """KV payload given to transports, repeats included."""
    num_committed: int = 0
    num_failed: int = 0
    """Ended without a commit; a decode worker that was busy does not count."""
    num_live: int = 0
    num_links: int = 0
    transports: Mapping[str, TransportTotals] = field(default_factory=dict)
    """By name, those that have been used."""


class HandoffSender:
    """Opens links to decode workers as hand-offs need them and keeps them while the peer lives.

    Belongs to one event loop: any number of `begin`, then `aclose`.
    """

    def __init__(
        self,
        *,
        info: WorkerInfo,
        store: KvBlockStore,
        config: TransferConfig,
        on_link_lost: LinkLostCallback | None = None,
        bind_host: str = "127.0.0.1",
        for_prefixes: bool = False,
        channels: Channels = PLAINTEXT,
        transports: Mapping[str, TransportKind] = TRANSPORTS,
    ) -> None:
        """`on_link_lost` is told of each decode process that counts as lost or refuses the link, after its hand-offs
        have ended. `bind_host` is this machine's address, for transports on which the prefill worker listens.
        `for_prefixes`: what is sent are prefixes that prefill workers have asked for, not requests. `channels` makes
        the connections over gRPC.

        Raises ConfigError for a transport that is not in `transports`.
        """
        self._info = info
        self._config = config
        self._context = TransportContext(
            incarnation=info.incarnation,
            store=store,
            config=config,
            bind_host=bind_host,
            advertised_host=info.address.rsplit(":", 1)[0] or bind_host,
            channels=channels,
            device=store.device,
        )
        self._for_prefixes = for_prefixes
        self._counters = TransportCounters()
        self._on_link_lost = on_link_lost
        self._transports = select(info.transports, transports)
        self._timers = PrefillTimers(
            resend_s=config.resend_s,
            reserve_timeout_s=config.reserve_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            # Longer than it takes to give up a transport that has swallowed the last chunk.
            commit_timeout_s=max(config.commit_timeout_s, 2 * config.chunk_timeout_s),
            renew_margin_s=config.renew_margin_s,
        )
        self._links: dict[str, tuple[PrefillLink, asyncio.Task[None]]] = {}
        """By incarnation of the decode process."""
        self._generations = itertools.count(1)
        """Shared by all links, so that a link which is opened again is always newer."""
        self._totals = SenderStats()
        """Of links that have ended."""
        self._closing = False

    def begin(self, job: HandoffPurpose, target: DecodeTarget, blocks: Sequence[int], num_tokens: int) -> Handoff:
        """A hand-off of the KV of `num_tokens` tokens in `blocks` to `target`. Nothing is sent before its `reserve`.
        Entries of `blocks` for what is hidden behind the model's window mean nothing.

        The caller owns the blocks throughout and frees them as `Handoff` says. Raises UnavailableError while closing.
        """
        if self._closing:
            raise UnavailableError(f"{self._info.role.value} worker {self._info.worker_id} is shutting down")
        layout, config = self._context.store.layout, self._config
        num_blocks, hidden = layout.num_blocks(num_tokens), hidden_tokens(job, layout)
        assert len(blocks) == num_blocks, f"{num_tokens} tokens need {num_blocks} blocks, got {len(blocks)}"
        num_sent = without(hidden, num_tokens)
        return Handoff(
            job=job,
            blocks=sent_blocks(blocks, hidden, layout.block_size),
            plan=ChunkPlan.make(num_sent, layout, config.target_chunk_bytes, tail_tokens=config.tail_tokens),
            timers=self._timers,
            link=self._link(target),
            num_tokens=num_tokens,
            hidden=hidden,
        )

    @property
    def stats(self) -> SenderStats:
        """Totals since start, and what is under way."""
        stats = self._totals
        for link, _ in self._links.values():
            stats = _add(stats, link)
        transports = self._counters.snapshot()
        bytes_posted = sum(totals.num_bytes for totals in transports.values())
        return replace(stats, bytes_posted=bytes_posted, num_links=len(self._links), transports=transports)

    async def aclose(self) -> None:
        """End every hand-off, tell the decode workers, and close the links, within about two seconds."""
        self._closing = True
        links = list(self._links.values())
        for link, _ in links:
            link.close()
        if not links:
            return
        _, late = await asyncio.wait([task for _, task in links], timeout=_CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()  # a peer that does not answer; it will notice the end of the stream
        if late:
            await asyncio.wait(late)

    def _link(self, target: DecodeTarget) -> PrefillLink:
        known = self._links.get(target.incarnation)
        if known is not None:
            return known[0]
        link = PrefillLink(
            target=target,
            info=self._info,
            context=self._context,
            transports=self._transports,
            generations=self._generations,
            counters=self._counters,
            for_prefixes=self._for_prefixes,
        )
        task = asyncio.create_task(self._run(link), name=f"kv-link-to-{target.worker_id}")
        self._links[target.incarnation] = (link, task)
        return link

    async def _run(self, link: PrefillLink) -> None:
        error: PdServeError | None = None
        try:
            error = await link.run()
        finally:
            del self._links[link.target.incarnation]
            self._totals = _add(self._totals, link)
        if error is not None and self._on_link_lost is not None:
            self._on_link_lost(link.target, error)


def _add(stats: SenderStats, link: PrefillLink) -> SenderStats:
    return SenderStats(
        num_committed=stats.num_committed + link.num_committed,
        num_failed=stats.num_failed + link.num_failed,
        num_live=stats.num_live + link.num_live,
    )
