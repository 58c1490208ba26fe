"""Colours of the live page stand out: text 4.5 to 1, graphics and the edges of controls 3 to 1 (WCAG 2.2)."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from frontend.status import frame

ASSETS = Path(frame.__file__).parent / "assets"
CSS = (ASSETS / "page.css").read_text()
Colour = tuple[float, float, float]

GROUNDS = ("bg", "surface", "sunken")
TEXT = [
    *product(("text", "muted"), GROUNDS),
    *product(("bad", "warn", "accent"), ("surface", "bg")),
    ("warn", "warn-soft"),
    ("bad", "bad-soft"),
    ("muted", "bad-soft"),
    ("surface", "text"),
]
"""(text, what is below the text); a soft colour lies on the surface."""
LINES = ("accent", "second", "bad")
PHASES = (*frame.PHASES, "other")
GRAPHICS = [
    *product((*LINES, *PHASES, "good", "warn"), ("surface",)),
    *product(("good", "warn", "bad", "other"), ("bg",)),
    *product(("accent", "queue", "bad"), ("sunken",)),
    *product(("edge",), ("bg", "surface")),
]
"""(line, bar, dot or edge of a control; what is beside it)."""


def schemes() -> dict[str, dict[str, str]]:
    """Variables of the light scheme, and of the dark scheme over them."""
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+);", block)) for block in roots())
    return {"light": light, "dark": light | dark}


def roots() -> list[str]:
    """The declarations of both `:root` rules."""
    return re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)


def channels(colour: str, under: Colour = (1.0, 1.0, 1.0)) -> Colour:
    """Red, green and blue from 0 to 1 of `#rrggbb`, or of `#rrggbbaa` laid over another colour."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in range(1, len(colour), 2)]
    alpha = parts[3] if len(parts) == 4 else 1.0
    red, green, blue = (part * alpha + below * (1 - alpha) for part, below in zip(parts, under, strict=False))
    return red, green, blue


def luminance(colour: Colour) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(scheme: dict[str, str], front: str, back: str) -> float:
    """Contrast of two variables, from 1 to 21."""
    surface = channels(scheme["surface"])
    first, second = (luminance(channels(scheme[name], surface)) for name in (front, back))
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    scheme = {"surface": "#ffffff", "black": "#000000", "grey": "#767676", "half": "#00000080"}
    assert contrast(scheme, "black", "surface") == pytest.approx(21)
    assert contrast(scheme, "grey", "surface") == pytest.approx(4.54, abs=0.01)
    assert contrast(scheme, "half", "surface") == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_every_text_and_every_graphic_stands_out(name: str) -> None:
    scheme = schemes()[name]
    weak = [
        f"{front} on {back}: {ratio:.2f} of {least}"
        for pairs, least in ((TEXT, 4.5), (GRAPHICS, 3.0))
        for front, back in pairs
        if (ratio := contrast(scheme, front, back)) < least
    ]
    assert weak == []


def test_every_phase_of_a_frame_has_a_word_and_a_colour_of_its_own() -> None:
    script = (ASSETS / "requests.js").read_text()
    listed = re.search(r"const PHASES = \[(.*?)\];", script)
    words = re.search(r"const PHASE_WORDS = \{(.*?)\n\};", script, re.DOTALL)
    assert listed is not None and words is not None
    assert tuple(re.findall(r'"(\w+)"', listed[1])) == PHASES
    assert tuple(re.findall(r"^  (\w+): ", words[1], re.MULTILINE)) == PHASES
    for phase in PHASES:
        assert f".p-{phase} {{ background: var(--{phase}); }}" in CSS
    for scheme in schemes().values():
        assert len({scheme[phase] for phase in PHASES}) == len(PHASES)


def test_colours_are_named_in_one_place_and_the_dark_scheme_has_each_of_them() -> None:
    light, dark = (set(re.findall(r"--([a-z-]+): #", block)) for block in roots())
    assert light == dark
    rules = re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b(?=[^{}]*;)", rules) == []
    used = set(re.findall(r"var\(--([a-z-]+)\)", CSS)) - {"sans", "mono", "shadow", "lift"}
    assert used <= light
