"""The checkpoints other tests are built on do what they promise, in transformers as the independent implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.testing.tiny_models import ScriptModel, TinyOptions, make_script_b, make_script_s, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE, END_OF_TURN, EOS, byte_level_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def generate(directory: Path, prompt: Sequence[int], max_new_tokens: int = 40) -> tuple[int, ...]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def written_text(made: ScriptModel) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.directory)
    assert generate(made.directory, [5, made.start_id]) == made.output_ids
    return str(tokenizer.decode([made.start_id, *made.output_ids], skip_special_tokens=True))


def test_script_b_writes_its_script_with_an_emoji_of_four_tokens(tmp_path: Path) -> None:
    made = make_script_b(tmp_path, start=">", script=["ok", "🌶", " end"])
    assert written_text(made) == ">ok🌶 end"
    assert len(made.output_ids) == 1 + 4 + 1 + 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.decode([i]) for i in made.output_ids[1:5]] == ["\ufffd"] * 4
    assert tokenizer.encode("go >")[-1] == made.start_id


def test_script_b_places_token_borders_as_asked(tmp_path: Path) -> None:
    script = ["one", " tw", "o\n", "Obs", "erv", "ation:", " x"]
    made = make_script_b(tmp_path, start=">", script=script)
    assert written_text(made) == ">" + "".join(script)
    assert len(made.output_ids) == len(script) + 1


def test_script_may_contain_a_second_eos(tmp_path: Path) -> None:
    options = TinyOptions(eos_tokens=(EOS, END_OF_TURN))
    made = make_script_b(tmp_path, start=">", script=["a", "b", END_OF_TURN, "c", "d"], options=options)
    assert made.output_ids[2] == 2
    assert made.output_ids[-1] == 1
    assert generate(tmp_path, [made.start_id]) == made.output_ids[:3]


def test_script_s_writes_its_script_with_spaces_at_word_starts(tmp_path: Path) -> None:
    made = make_script_s(tmp_path, start="▁go", script=["▁Hello", "▁big", "▁wor", "ld", "!", "▁Bye"])
    assert written_text(made) == "go Hello big world! Bye"
    assert len(made.output_ids) == 7


def test_script_s_can_use_byte_fallback(tmp_path: Path) -> None:
    made = make_script_s(tmp_path, start="▁go", script=["▁x", *(f"<0x{b:02X}>" for b in "🌶".encode())])
    assert written_text(made) == "go x🌶"


def test_a_script_that_repeats_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only once"):
        make_script_b(tmp_path, start=">", script=["a", "b", "a"])


def test_tiny_kv_output_depends_on_the_whole_prompt(tmp_path: Path) -> None:
    directory = make_tiny_kv(tmp_path / "m", options=TinyOptions(eos_tokens=()))
    prompt = list(range(10, 50))
    first = generate(directory, prompt, 16)
    assert len(set(first)) > 8
    assert generate(directory, [11, *prompt[1:]], 16) != first
    assert generate(make_tiny_kv(tmp_path / "other", seed=1), prompt, 16) != first


def test_tokenizer_adds_bos_and_chat_template_only_if_asked(tmp_path: Path) -> None:
    make_tiny_kv(tmp_path / "plain")
    plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert plain.encode("the") == byte_level_tokenizer().encode("the").ids
    assert plain.chat_template is None
    make_tiny_kv(tmp_path / "full", options=TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE))
    full = transformers.AutoTokenizer.from_pretrained(tmp_path / "full")
    assert full.encode("the") == [0, *plain.encode("the")]
    messages = [{"role": "user", "content": "hi"}]
    assert (
        full.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "<s>[user] hi<|end|>[assistant] "
    )


def test_pieces_are_single_tokens_when_encoded() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode(" the of and").tokens == ["Ġthe", "Ġof", "Ġand"]
    assert tokenizer.decode(tokenizer.encode("grüße 🌶 the end").ids) == "grüße 🌶 the end"
