"""Where the KV of prompts already is: fed by what workers announce, asked by placement. Look-ups never wait."""

from router.index.feed import IndexFeed
from router.index.locations import HASH_INLINE_TOKENS, PrefixLocations, PrefixNames
from router.index.prefix_index import PrefixIndex

__all__ = ["HASH_INLINE_TOKENS", "IndexFeed", "PrefixIndex", "PrefixLocations", "PrefixNames"]
