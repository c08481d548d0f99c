"""Fields that clients send and this server does not implement: refused by name, or ignored where nothing can be missed.

A field that would change the answer is refused, unless its value asks for what happens anyway. One that no server of
this kind acts upon is taken silently. What is in neither list is unknown: it is ignored, with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from pdserve.errors import InvalidRequestError
from router.http.fields import Body

log = logging.getLogger(__name__)

REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Field of chat and plain completions -> values that may be sent all the same."""

REFUSED_IN_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    **REFUSED,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""The same for chat completions alone."""

REFUSED_IN_COMPLETIONS: Final[Mapping[str, tuple[object, ...]]] = {
    **REFUSED,
    "suffix": ("",),
}
"""The same for plain completions alone."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_INSTEAD: Final = {
    "best_of": "n",
    "function_call": "tool_choice",
    "functions": "tools",
    "prompt_logprobs": "echo together with logprobs, in /v1/completions",
}

_MAX_NAMED = 10
_MAX_NAME = 40


def check_extra(body: Body, refused: Mapping[str, tuple[object, ...]]) -> None:
    """Raises InvalidRequestError for fields of `refused` with a value that matters; logs the names of unknown ones."""
    extra: Mapping[str, Any] = body.model_extra or {}
    problems = [name for name, value in extra.items() if name in refused and value not in refused[name]]
    if problems:
        raise InvalidRequestError(
            "; ".join(
                f"{name}: is not supported by this server" + (f"; use {_INSTEAD[name]}" if name in _INSTEAD else "")
                for name in sorted(problems)
            ),
            field=min(problems),
        )
    unknown = sorted(name for name in extra if name not in refused and name not in WITHOUT_EFFECT)
    if unknown:
        # Names come from a client: bounded, and quoted so that they cannot look like another line.
        log.info(
            "fields ignored: %s",
            ", ".join(repr(name[:_MAX_NAME]) for name in unknown[:_MAX_NAMED]),
            extra={"num_ignored_fields": len(unknown)},
        )
