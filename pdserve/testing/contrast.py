"""Contrast of what is to be read on a page, as WCAG 2 defines it."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

_TEXTS = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const opaque = (color) => !/, 0\\)$/.test(color) && color !== "transparent";
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const box = element.getBoundingClientRect();
    if (!walker.currentNode.textContent.trim() || !box.width || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .skip, noscript")) continue;
    const style = getComputedStyle(element);
    let ground = element;
    while (ground && !opaque(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    found.push({
      text: walker.currentNode.textContent.trim().slice(0, 40),
      ink: element instanceof SVGElement ? style.fill : style.color,
      ground: getComputedStyle(ground ?? document.documentElement).backgroundColor,
    });
  }
  return found;
})()
"""


def contrasts(page: Page) -> dict[str, float]:
    """Ratio, 1 to 21, of each text that is shown to the colour behind it. Disabled controls need none."""
    texts: list[dict[str, Any]] = page.evaluate(_TEXTS)
    return {f"{one['text']!r} {one['ink']} on {one['ground']}": _ratio(one["ink"], one["ground"]) for one in texts}


def _ratio(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    """Of `rgb(r, g, b)`."""
    channels = [int(part) / 255 for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
