"""Text as clients see it: streamed and whole, on models whose output a test can choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve.testing.both_apis import Answer, Ask, BothApis
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import ScriptModel, make_script_s

pytestmark = pytest.mark.timeout(180)


async def all_ways(
    cluster: ProcessCluster,
    *,
    token_ids: Sequence[int] | None = None,
    messages: Sequence[dict[str, str]] | None = None,
    **options: Any,
) -> Answer:
    """The greedy answer, over gRPC and HTTP, streamed and not."""
    common = {"temperature": 0.0, "max_tokens": 20, **options}
    async with BothApis.of(cluster) as apis:
        answer = await apis.ask(Ask(token_ids=token_ids, messages=messages, common=common))
    assert answer.completion_tokens == len(answer.only.token_ids)
    assert len(answer.deltas) == 2
    assert {"".join(deltas) for deltas in answer.deltas} == {answer.only.text}
    return answer


async def test_a_character_of_several_tokens_is_not_split(
    script_b: ProcessCluster, script_b_model: ScriptModel
) -> None:
    """O-TOK-1."""
    script = script_b_model.output_ids[14:]
    answer = await all_ways(script_b, token_ids=script[:1])
    assert answer.only.token_ids == script[1:]
    assert len(answer.only.token_ids) == 7, "the emoji is four tokens"
    assert answer.only.text == "ok🌶 end"
    assert answer.only.finish_reason == "stop"
    for deltas in answer.deltas:
        assert not any("\ufffd" in delta for delta in deltas)
        assert len([d for d in deltas if d]) > 1, "streamed, not sent at the end"


async def test_a_character_that_stays_incomplete_is_not_left_out(
    script_b: ProcessCluster, script_b_model: ScriptModel
) -> None:
    """O-TOK-1: cut by max_tokens after two of its four bytes."""
    script = script_b_model.output_ids[14:]
    answer = await all_ways(script_b, token_ids=script[:1], max_tokens=3)
    assert answer.only.text.startswith("ok")
    assert answer.only.text == script_b.client.detokenize(script[1:4])
    for deltas in answer.deltas:
        *before, _ = [delta for delta in deltas if delta]
        assert not any("\ufffd" in delta for delta in before), "only the end knows that nothing follows"


async def test_a_stop_string_across_tokens_never_leaks(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """O-TOK-3."""
    answer = await all_ways(script_b, token_ids=[script_b_model.start_id], stop=["\nObservation:"])
    assert answer.only.text == "one two"
    assert answer.only.finish_reason == "stop"
    assert answer.completion_tokens == 6
    assert not any("\n" in delta for deltas in answer.deltas for delta in deltas)
    result = script_b.client.generate(token_ids=[script_b_model.start_id], stop=["\nObservation:"], temperature=0)
    assert result.matched_stop == "\nObservation:"


async def test_without_the_stop_string_the_text_goes_on(script_b: ProcessCluster, script_b_model: ScriptModel) -> None:
    """Control of the test above: text that only begins like a stop string is given out after all."""
    answer = await all_ways(script_b, token_ids=[script_b_model.start_id], stop=["\nObservation!"], max_tokens=7)
    assert answer.only.text == "one two\nObservation: x"
    assert answer.only.finish_reason == "length"


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


async def test_sentencepiece_spaces_are_kept(script_s: ProcessCluster, script_s_model: ScriptModel) -> None:
    """O-TOK-2."""
    prompt = [script_s_model.start_id]
    output = (await all_ways(script_s, token_ids=prompt)).only
    assert output.token_ids == script_s_model.output_ids
    tokenizer: Any = AutoTokenizer.from_pretrained(script_s_model.directory)
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *output.token_ids], skip_special_tokens=True)
    assert before + output.text == whole == "Say Hello big world! Bye"
    # One request per length: wherever the output ends, no space is lost.
    for n in range(1, 7):
        cut = (await all_ways(script_s, token_ids=prompt, max_tokens=n)).only
        assert before + cut.text == tokenizer.decode([*prompt, *output.token_ids[:n]])


async def test_a_chat_has_one_bos(one_pair: ProcessCluster, tiny_model: Path, reference_model: Any) -> None:
    """O-TOK-4: tokenizer and template both write BOS."""
    messages = [{"role": "user", "content": "Hello, are you there?"}]
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert expected.count(tokenizer.bos_token_id) == 1
    assert one_pair.client.tokenize(messages=messages) == tuple(expected)
    answer = await all_ways(one_pair, messages=messages, max_tokens=8, ignore_eos=True)
    assert answer.prompt_tokens == len(expected)
    (check,) = check_greedy(reference_model, [expected], [answer.only.token_ids])
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
