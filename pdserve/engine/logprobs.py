"""Log-probabilities in torch, on the device of the logits, with one copy to the host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.device import to_host, upload
from pdserve.engine.output import Logprobs


def raw_logprobs(
    slices: Iterable[torch.Tensor], token_ids: npt.NDArray[np.int64], num_top: int, device: torch.device
) -> Logprobs:
    """Log-probabilities of `token_ids` [N], and the `num_top` greatest, by raw logits [N, V] that come in slices of
    rows: all at once they are as wide as the vocabulary for every token of a prompt."""
    targets = upload(token_ids, device)
    begin, found = 0, []
    for logits in slices:
        end = begin + len(logits)
        total = logits.logsumexp(dim=-1, keepdim=True)
        top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        chosen = logits.gather(1, targets[begin:end, None])
        # Token ids are exact in float64, so one array takes everything to the host.
        found.append(torch.cat([(chosen - total).double(), (top.values - total).double(), top.indices.double()], dim=1))
        begin = end
    host = to_host(torch.cat(found))
    width = (host.shape[1] - 1) // 2
    # Columns: the token's | 1 ... K the greatest | K+1 ... 2K their ids
    return Logprobs(
        token_ids=token_ids,
        logprobs=host[:, 0].astype(np.float32),
        top_ids=host[:, 1 + width :].astype(np.int64),
        top_logprobs=host[:, 1 : 1 + width].astype(np.float32),
    )
