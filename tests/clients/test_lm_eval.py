"""lm-evaluation-harness with `local-completions`: scores of continuations, and greedy output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


class Reference:
    """The model in transformers, float32."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        """The harness adds no BOS."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.no_grad()
    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-probability of the continuation, and whether it is the most likely one, token by token."""
        begin, ids = len(self.ids(context)), self.ids(context + continuation)
        rows = self._model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(ids[begin:])
        return rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(-1) == wanted).all())

    @torch.no_grad()
    def continue_greedily(self, context: str, num_tokens: int) -> str:
        """Text of the output."""
        ids = torch.tensor([self.ids(context)])
        out = self._model.generate(ids, max_new_tokens=num_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
        text: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_the_harness_measures_what_it_measures_of_the_model_itself(
    client_of: Any, server: Any, tmp_path: Path, backend: str
) -> None:
    """With a tokenizer of its own, and with the server's."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    got = client_of("lm-eval").drive("evaluate", server, server.directory, backend, tasks)
    torch.set_num_threads(1)
    reference = Reference(server.directory)
    assert len(got["choices"]) == 8
    for context, continuation, value, greedy in got["choices"]:
        expected, expected_greedy = reference.score(context, continuation)
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy is expected_greedy
    for context, output in got["outputs"]:
        assert output == reference.continue_greedily(context, 12).partition("\n\n")[0]
    assert 0 <= got["accuracy"] <= 1
