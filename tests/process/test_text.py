"""Text as clients see it: streamed and whole, on models whose output a test can choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve.client import Client, GenerateOptions, Generation
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import ScriptModel, make_script_s

pytestmark = pytest.mark.timeout(180)


def both_ways(client: Client, **options: Any) -> tuple[list[str], Generation]:
    """Deltas of a stream, and the result of a second request that is not streamed; both must agree."""
    arguments: GenerateOptions = {"temperature": 0.0, "max_tokens": 20, **options}  # type: ignore[typeddict-item]
    with client.stream(**arguments) as stream:
        deltas = [delta.text for delta in stream]
        streamed = stream.result()
    whole = client.generate(**arguments)
    for name in ("text", "token_ids", "finish_reason", "matched_stop"):
        assert getattr(streamed, name) == getattr(whole, name), name
    assert streamed.usage.prompt_tokens == whole.usage.prompt_tokens
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens == len(whole.token_ids)
    assert "".join(deltas) == whole.text
    return deltas, whole


def test_a_character_of_several_tokens_is_not_split(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """O-TOK-1."""
    script = script_b_model.output_ids[14:]
    deltas, result = both_ways(script_b.client, token_ids=script[:1])
    assert result.token_ids == script[1:]
    assert len(result.token_ids) == 7, "the emoji is four tokens"
    assert result.text == "ok🌶 end"
    assert result.finish_reason == "stop"
    assert not any("\ufffd" in delta for delta in deltas)
    assert len([d for d in deltas if d]) > 1, "streamed, not sent at the end"


def test_a_character_that_stays_incomplete_is_not_left_out(
    script_b: ProcessCluster, script_b_model: ScriptModel
) -> None:
    """O-TOK-1: cut by max_tokens after two of its four bytes."""
    script = script_b_model.output_ids[14:]
    deltas, result = both_ways(script_b.client, token_ids=script[:1], max_tokens=3)
    assert result.text.startswith("ok")
    assert result.text == script_b.client.detokenize(script[1:4])
    assert not any("\ufffd" in delta for delta in deltas[:-1]), "only the end knows that nothing follows"


def test_a_stop_string_across_tokens_never_leaks(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """O-TOK-3."""
    deltas, result = both_ways(script_b.client, token_ids=[script_b_model.start_id], stop=["\nObservation:"])
    assert result.text == "one two"
    assert result.finish_reason == "stop"
    assert result.matched_stop == "\nObservation:"
    assert result.usage.completion_tokens == 6
    assert not any("\n" in delta for delta in deltas)


def test_without_the_stop_string_the_text_goes_on(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """Control of the test above: text that only begins like a stop string is given out after all."""
    _, result = both_ways(script_b.client, token_ids=[script_b_model.start_id], stop=["\nObservation!"], max_tokens=7)
    assert result.text == "one two\nObservation: x"
    assert result.finish_reason == "length"


@pytest.fixture(scope="module")
def script_s_model(tmp_path_factory: pytest.TempPathFactory) -> ScriptModel:
    return make_script_s(
        tmp_path_factory.mktemp("model") / "script-s",
        start="▁Say",
        script=("▁Hello", "▁big", "▁wor", "ld", "!", "▁Bye"),
    )


@pytest.fixture(scope="module")
def script_s(script_s_model: ScriptModel) -> Iterator[ProcessCluster]:
    with ProcessCluster(script_s_model.directory, kv__num_blocks=64) as cluster:
        yield cluster


def test_sentencepiece_spaces_are_kept(script_s: ProcessCluster, script_s_model: ScriptModel) -> None:
    """O-TOK-2."""
    prompt = [script_s_model.start_id]
    _, result = both_ways(script_s.client, token_ids=prompt)
    assert result.token_ids == script_s_model.output_ids
    tokenizer: Any = AutoTokenizer.from_pretrained(script_s_model.directory)
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *result.token_ids], skip_special_tokens=True)
    assert before + result.text == whole == "Say Hello big world! Bye"
    # One request per length: wherever the output ends, no space is lost.
    for n in range(1, 7):
        _, cut = both_ways(script_s.client, token_ids=prompt, max_tokens=n)
        assert before + cut.text == tokenizer.decode([*prompt, *result.token_ids[:n]])


def test_a_chat_has_one_bos(one_pair: ProcessCluster, tiny_model: Path, reference_model: Any) -> None:
    """O-TOK-4: tokenizer and template both write BOS."""
    messages = [{"role": "user", "content": "Hello, are you there?"}]
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert expected.count(tokenizer.bos_token_id) == 1
    assert one_pair.client.tokenize(messages=messages) == tuple(expected)
    _, result = both_ways(one_pair.client, messages=messages, max_tokens=8, ignore_eos=True)
    assert result.usage.prompt_tokens == len(expected)
    (check,) = check_greedy(reference_model, [expected], [result.token_ids])
    assert check.wrong_step is None


def test_a_completion_has_one_bos_if_the_tokenizer_adds_it(
    one_pair: ProcessCluster, script_b: ProcessCluster, tiny_model: Path
) -> None:
    """O-TOK-4."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = one_pair.client.tokenize("one and one")
    assert list(ids) == tokenizer.encode("one and one")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert one_pair.client.generate("one and one", max_tokens=1).usage.prompt_tokens == len(ids)
    plain = one_pair.client.tokenize("one and one", add_special_tokens=False)
    assert ids == (tokenizer.bos_token_id, *plain)
    without_bos = AutoTokenizer.from_pretrained(script_b.settings["model.path"])
    assert script_b.client.tokenize("one and one").count(without_bos.bos_token_id) == 0
