"""The tokenizer that every process uses: text and chats to token ids, token ids to text."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from pdserve.errors import InvalidRequestError
from pdserve.tokenizer.chat import ChatTemplate, check_messages, map_texts, require_unicode, texts_of
from pdserve.tokenizer.content_shield import ContentShield, any_of
from pdserve.tokenizer.pieces import DecodeRule


class Tokenizer:
    """Encodes and decodes for one model. Immutable as seen from outside; any thread may use it.

    BOS and the like: `encode` adds what the model's tokenizer adds, so a raw prompt of a model with BOS has exactly
    one, also when the text itself begins with the BOS string. `encode_chat` adds nothing: the template has the last
    word, as in transformers' `apply_chat_template`.

    Special-token strings: in raw text they are the special tokens, as in transformers; whoever sends raw text writes
    the whole prompt. In chat message content they are text (see `content_shield`).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        decode_rule: DecodeRule,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        """`backend` must be a BPE tokenizer, and belongs to the new object: nobody else may change it."""
        # Files may carry the settings of a training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._rule = decode_rule
        self._chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        """What ends an output: as the model's files say, not only the tokenizer's one EOS."""
        self._special_ids = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._any_special = any_of(self._special_ids)
        self.special_token_ids = frozenset(self._special_ids.values())
        """Control tokens: found in raw text, left out of output text."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, special ones included. The model may have more rows than that."""
        self.adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        """Whether raw text gets a BOS."""
        self._bytes_of_id: dict[int, bytes] = {}
        self._text_of_id: dict[int, str | None] = {}
        self._shield: ContentShield | None = None
        self._shield_lock = threading.Lock()

    @property
    def decode_rule(self) -> DecodeRule:
        """How token bytes become text."""
        return self._rule

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str | None:
        """The Jinja text of the chat template; None if the model has none."""
        return self._chat_template.source if self._chat_template is not None else None

    @property
    def chat_template_takes_tools(self) -> bool:
        """Whether the chat template shows the model what functions it may call."""
        return self._chat_template is not None and self._chat_template.takes_tools

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text. Raises InvalidRequestError for text that is not valid Unicode."""
        require_unicode(text, "text")
        # The form for several texts can do without positions in the text, which take time.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids. Ids outside the vocabulary give no text: a model may have spare rows.

        Bytes that are no UTF-8 become U+FFFD, one for each maximal invalid run, in every kind of vocabulary. (For
        byte-fallback vocabularies transformers replaces whole runs of byte tokens, valid characters included.)
        """
        return self._rule.text(b"".join([self.id_to_bytes(i, skip_special_tokens) for i in ids]))

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None when there is no such token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def id_to_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes that the token adds to a text; possibly a part of a character."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        data = self._bytes_of_id.get(token_id)
        if data is None:
            piece = self.id_to_piece(token_id)
            if piece is None:
                return b""
            data = self._bytes_of_id[token_id] = self._rule.piece_bytes(piece)
        return data

    def id_to_text(self, token_id: int, skip_special_tokens: bool = False) -> str | None:
        """What the token adds to a text that ends with a whole character; None if it has a part of a character, or
        bytes that are none."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return ""
        try:
            return self._text_of_id[token_id]
        except KeyError:
            text: str | None
            try:
                text = self.id_to_bytes(token_id).decode("utf-8")
            except UnicodeDecodeError:
                text = None
            if self.id_to_piece(token_id) is not None:
                self._text_of_id[token_id] = text
            return text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of a chat, for people to read. To get its tokens use `encode_chat`.

        `messages` have `role` and `content` (see `check_messages`); `kwargs` become variables of the template, but for
        `continue_final_message` (see `ChatTemplate.render`). Raises InvalidRequestError when messages are malformed,
        refused by the template, or the model has no template.
        """
        return self._template().render(check_messages(messages), add_generation_prompt=add_generation_prompt, **kwargs)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a chat. Parameters and errors as `render_chat`.

        Nothing is added to what the template writes: one that writes BOS must not get a second one, and one that
        writes none was trained without.
        """
        template, checked = self._template(), check_messages(messages)
        # What clients write, in contrast to what the template does.
        written = {"messages": checked, "tools": kwargs.get("tools")}
        if not self.spells_special(written):
            rendered = template.render(checked, add_generation_prompt=add_generation_prompt, **kwargs)
            return self.encode(rendered, add_special_tokens=False)
        shield = self._content_shield()
        hidden = map_texts(written, shield.hide)
        variables = {**kwargs, "tools": hidden["tools"]}
        rendered = template.render(hidden["messages"], add_generation_prompt=add_generation_prompt, **variables)
        return shield.encode(require_unicode(rendered, "messages"))

    def spells_special(self, value: Any) -> bool:
        """Whether a text in a JSON value has the name of a special token in it. A chat with one takes longer to encode,
        and the first one much longer."""
        search = self._any_special.search
        return any(search(text) for text in texts_of(value))

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template; send a text prompt, or serve a model that has one",
                field="messages",
            )
        return self._chat_template

    def _content_shield(self) -> ContentShield:
        with self._shield_lock:
            if self._shield is None:
                self._shield = ContentShield(self._backend, self._special_ids)
            return self._shield
