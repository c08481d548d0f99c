"""What room the outputs of a prompt need at a decode worker, whether they can ever have it, and taking it.

All of them get it at once, or none does. The full blocks of the prompt are there once; each output has blocks of its
own behind them, in which the part of the prompt that fills no block comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.sequences import Sequence
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import DeadlineExceededError, InvalidRequestError, PromptTooLongError
from pdserve.kv_window import AHEAD_TOKENS
from pdserve.types import GenerationJob, HandoffId


def blocks_at_most(blocks: SequenceBlocks, job: GenerationJob) -> int:
    """Blocks that one output of `job` may come to need at once. The last token that may be drawn is never computed and
    needs no KV."""
    return blocks.most_blocks(job.max_total_tokens - 1)


def tokens_to_set_aside(job: GenerationJob, num_known_tokens: int, reserve_tokens: int) -> int:
    """Tokens to set blocks aside for when so many are known and `reserve_tokens` more are expected."""
    return min(num_known_tokens + reserve_tokens, job.max_total_tokens - 1)


@dataclass(frozen=True, slots=True)
class Need:
    """Room for the outputs of one job."""

    job: GenerationJob
    branches: tuple[GenerationJob, ...]
    room: int
    """Tokens to have blocks for, of each output."""
    num_shared_blocks: int
    num_own_blocks: int
    """Of each output."""
    arrives: bool
    """By hand-off, without what is hidden behind the model's window."""

    @classmethod
    def of(
        cls, job: GenerationJob, num_tokens: int, blocks: SequenceBlocks, reserve_tokens: int, *, arrives: bool = False
    ) -> Need:
        """`num_tokens` is how many tokens of KV a hand-off brings, or are computed here."""
        room = tokens_to_set_aside(job, num_tokens, reserve_tokens)
        if blocks.window.size:
            # No more than a pool that holds one stream's window is sure to have: the rest comes as the stream grows.
            room = min(room, num_tokens + AHEAD_TOKENS)
            if not arrives:
                room = min(room, blocks.capacity_tokens)
        room = max(room, num_tokens)
        num_full_blocks = num_tokens // blocks.block_size
        num_hidden = len(blocks.window.hidden_blocks(job.num_known_tokens, blocks.block_size)) if arrives else 0
        num_own_blocks = blocks.blocks_for(room) - num_full_blocks
        return cls(job, job.branches, room, num_full_blocks - num_hidden, num_own_blocks, arrives)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.num_shared_blocks + len(self.branches) * self.num_own_blocks

    def check(
        self,
        worker_id: str,
        blocks: SequenceBlocks,
        max_batch_size: int,
        num_tokens: int,
        now: float,
        *,
        migrates: bool = False,
    ) -> None:
        """Raise InvalidRequestError, PromptTooLongError or DeadlineExceededError for what can never be served here.

        `migrates`: it runs elsewhere, and may have KV of more tokens than those of its job by the time it comes.
        """
        job = self.job
        most = max(job.num_known_tokens, job.max_total_tokens - 1) if migrates else job.num_known_tokens
        if not job.num_known_tokens <= num_tokens <= most:
            raise InvalidRequestError(
                f"reserve.num_tokens: {num_tokens} tokens of KV announced for {job.num_known_tokens} token ids",
                field="reserve.num_tokens",
            )
        if migrates and job.forks:
            raise InvalidRequestError("job.forks: a stream that runs has none", field="job.forks")
        if job.deadline is not None and now >= job.deadline:
            raise DeadlineExceededError("the deadline had passed before the decode worker was asked")
        if max(blocks_at_most(blocks, job), self.num_shared_blocks + self.num_own_blocks) > blocks.num_blocks:
            raise PromptTooLongError(
                f"job.token_ids: {job.num_prompt_tokens} prompt tokens and up to {job.max_new_tokens} new ones do not "
                f"fit: the KV pool of this decode worker holds {blocks.capacity_tokens}",
                field="job.token_ids",
            )
        num_branches = len(self.branches)
        if num_branches > 1 and (num_branches > max_batch_size or self.num_blocks > blocks.num_blocks):
            raise InvalidRequestError(
                f"job.forks: {num_branches} outputs need {num_branches} places in the batch and {self.num_blocks} "
                f"blocks at once: decode worker {worker_id} has {max_batch_size} and {blocks.num_blocks}; ask for them "
                "one by one",
                field="job.forks",
            )

    def take(self, blocks: SequenceBlocks, keep: int, *, reuse: bool = True) -> list[Sequence] | None:
        """The sequences, with their blocks; None if those are not there now. `keep` blocks stay available to others,
        and without `reuse` nothing is taken from the prefix cache."""
        job, (lead, *forks) = self.job, (HandoffId(b.request_id, b.attempt) for b in self.branches)
        hashes = blocks.chain(job.cache_salt)
        num_held = blocks.open(
            lead,
            job.token_ids,
            hashes,
            room=self.room,
            keep=keep + len(forks) * self.num_own_blocks,
            reuse=reuse,
            arrives=self.arrives,
        )
        if num_held is None:
            return None
        sequences = [
            Sequence(job=self.branches[0], handoff=lead, hashes=hashes, num_held=num_held, tokens=list(job.token_ids))
        ]
        for key, branch in zip(forks, self.branches[1:], strict=True):
            chain = hashes.fork()
            forked = blocks.fork(key, lead, chain, num_tokens=job.num_known_tokens, room=self.room)
            assert forked, "what was kept available for the forks is there"
            sequences.append(Sequence(job=branch, handoff=lead, hashes=chain, num_held=0, tokens=list(job.token_ids)))
        return sequences
