"""Answers that a program can use: the model can generate nothing but JSON of the given shape.

python examples/structured_output.py [ROUTER]
"""

import sys
from typing import Literal

from pydantic import BaseModel, Field

from pdserve.client import DEFAULT_ADDRESS, Client


class Review(BaseModel):
    """What we want to know of a review."""

    sentiment: Literal["positive", "negative", "mixed"]
    stars: int = Field(ge=1, le=5)
    topics: list[str] = Field(max_length=3)


address = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS
text = "The battery lasts for days, but the screen is far too dark outside."

with Client(address) as client:
    question = [{"role": "user", "content": f"Summarise this review as JSON: {text}"}]
    review = client.generate(messages=question, json_schema=Review, max_tokens=128, temperature=0).parse(Review)
    print(f"{review.stars} stars, {review.sentiment}, about {', '.join(review.topics) or 'nothing'}")

    question = [{"role": "user", "content": f"Would the author buy it again? {text}"}]
    print(client.generate(messages=question, choice=["yes", "no", "unclear"], temperature=0).text)
