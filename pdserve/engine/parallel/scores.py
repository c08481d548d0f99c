"""Log-probabilities where each rank has the logits of some of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.device import to_host, upload
from pdserve.engine.output import Logprobs
from pdserve.engine.parallel.collectives import Collectives


def propose_scores(
    logits: torch.Tensor,
    targets: npt.NDArray[np.int64],
    num_top: int,
    first_id: int,
    collectives: Collectives,
) -> list[torch.Tensor]:
    """Send to rank 0 what it needs of raw `logits` [N, V of this rank] for `targets` [N] and the `num_top` greatest.

    Gives, by rank, float64 [N, 2 + 2 num_top]: logsumexp | logit of the target, -inf elsewhere | greatest | their ids.
    Nothing but on rank 0.
    """
    ids = upload(targets, logits.device) - first_id
    elsewhere = (ids < 0) | (ids >= logits.shape[1])
    target = logits.gather(1, ids.masked_fill(elsewhere, 0)[:, None]).masked_fill(elsewhere[:, None], -torch.inf)
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    missing = (0, num_top - top.values.shape[1])
    values = torch.nn.functional.pad(top.values, missing, value=-torch.inf)
    top_ids = torch.nn.functional.pad(top.indices + first_id, missing)
    total = logits.logsumexp(dim=-1, keepdim=True)
    return collectives.gather(torch.cat([total.double(), target.double(), values.double(), top_ids.double()], dim=1))


def merge_scores(parts: Sequence[torch.Tensor], targets: npt.NDArray[np.int64], num_top: int) -> Logprobs:
    """On rank 0: the log-probabilities by what all ranks have sent."""
    ranks = torch.stack(list(parts))
    total = ranks[:, :, 0].logsumexp(dim=0)[:, None]
    target = ranks[:, :, 1].amax(dim=0)[:, None]
    values = ranks[:, :, 2 : 2 + num_top].movedim(0, 1).flatten(1)
    ids = ranks[:, :, 2 + num_top :].movedim(0, 1).flatten(1)
    top = values.topk(num_top, dim=-1)
    host = to_host(torch.cat([target - total, top.values - total, ids.gather(1, top.indices)], dim=1))
    # Columns: the target's | 1 ... K the greatest | K+1 ... 2K their ids
    return Logprobs(
        token_ids=targets,
        logprobs=host[:, 0].astype(np.float32),
        top_ids=host[:, 1 + num_top :].astype(np.int64),
        top_logprobs=host[:, 1 : 1 + num_top].astype(np.float32),
    )
