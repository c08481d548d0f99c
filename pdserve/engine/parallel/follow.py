"""What a follower does all day: one message of rank 0 after the other."""

from __future__ import annotations

import torch

from pdserve.engine.block_pool import CudaStaging
from pdserve.engine.parallel.batch_codec import batch_from_arrays
from pdserve.engine.parallel.messages import Array, Channel, ChannelClosedError, Kind, ProtocolError
from pdserve.engine.parallel.rank_model import RankModel
from pdserve.engine.torch_engine import NOBODY, StepProgress


@torch.inference_mode()
def follow(channel: Channel, rank: RankModel, staging: CudaStaging | None) -> None:
    """Compute what rank 0 says until it goes. `staging`: of the pool of `rank` on a GPU.

    Raises ProtocolError, and whatever goes wrong in a step: rank 0 cannot go on either then.
    """
    while True:
        try:
            kind, arrays = channel.receive()
        except ChannelClosedError:
            return
        _obey(rank, staging, kind, arrays)


def _obey(rank: RankModel, staging: CudaStaging | None, kind: Kind, arrays: list[Array]) -> None:
    match kind, arrays:
        case Kind.FORWARD, _:
            progress = StepProgress(NOBODY, staging)
            rank.forward(batch_from_arrays(arrays), progress.after_layers)
            progress.submitted(rank.pool.layout.num_layers)
        case Kind.DRAW, [masks]:
            rank.draw(masks)
        case Kind.GATHER, [rows]:
            rank.gather(rows)
        case Kind.GATHER_RAW, []:
            rank.gather_raw()
        case Kind.SCORE_DRAWN, [token_ids]:
            rank.score_drawn(token_ids)
        case Kind.SCORE_PROMPT, []:
            rank.score_prompt()
        case _:
            raise ProtocolError(f"{kind.name} with {len(arrays)} arrays makes no sense here")
