"""Texts and pictures of the comparison: questions, passages with answers, and texts that are hard for tokenizers."""

from __future__ import annotations

import io
from typing import Any

from ipc import extras
from ipc.errors import DependencyConflict

QUERIES = tuple(
    """
What keeps a bicycle upright while it is moving?
how long should I boil an egg for a firm yolk
Which river flows through Vienna?
reset a forgotten e-mail password
Why do leaves turn red in autumn?
largest planet of the solar system
Wer hat die Zauberflöte komponiert?
difference between TCP and UDP
treatment of a sprained ankle
¿Cuándo se inventó la imprenta?
""".strip().splitlines()
)

PASSAGES = tuple(
    """
Steering into a fall moves the wheels back under the rider, which is why a rolling bike stays up.
Nine to ten minutes in boiling water give a hard yolk; six leave it soft.
The Danube crosses the Austrian capital from the north-west to the south-east.
Open the login page, choose 'forgot password' and follow the link that we send to your other address.
When days grow short, trees break down chlorophyll, and other pigments in the leaf begin to show.
Jupiter is more than twice as heavy as all other planets together.
Mozart schrieb die Oper 1791, im letzten Jahr seines Lebens, für ein Theater in der Wiener Vorstadt.
One protocol delivers every byte in order and again if lost; the other sends packets and forgets them.
Rest the foot, cool it, wrap it and put it up; see a doctor when you cannot step on it.
Hacia 1440 Johannes Gutenberg empezó a imprimir con tipos móviles de metal en Maguncia.
The bakery on the corner sells rye bread on Tuesdays and Fridays.
Interest on the loan is due at the end of each quarter, not of each month.
She tuned the cello, sat down, and waited for the conductor to raise his baton.
""".strip().splitlines()
)

ODDITIES = (
    *("a", "2024-02-29 13:37:00 +0100, 1,234.50 EUR", "for (int i = 0; i < n; ++i) { sum += x[i] * y[i]; }"),
    *("crème brûlée, naïve façade, Łódź, Ångström", "機械学習は、データから規則性を学ぶ技術です。"),
    *("Погода завтра будет тёплой и солнечной.", "great 🎉🎉 see you tomorrow 👩‍👩‍👧‍👦"),
    *("  spaces   and\ttabs\nand line breaks  ", "The mill stands where the brook leaves the wood. " * 60),
)

DOCUMENTS = (*PASSAGES, *ODDITIES)

NEWS = (
    "Maria Keller moved from Zurich to Toronto in 2019 to work for Siemens.",
    "The United Nations met in Geneva while Kenya and Brazil signed the treaty.",
    "Tim Berners-Lee invented the web at CERN.",
    "Nobody came, and nothing was sold.",
    "In Łódź traf Anna Schmidt die Leute von Volkswagen.",
)

OPINIONS = (
    "The battery lasts two days and the screen is wonderful.",
    "It broke after a week, and nobody answers my letters.",
    "The parcel arrived on Thursday.",
    "I am so sorry for your loss.",
    "You are an idiot and should leave.",
)
OPINION_LABELS = ("praise", "complaint", "delivery", "sympathy")


_SCENES = (
    ((320, 240), (235, 240, 250), (("ellipse", (40, 40, 140, 140), (200, 30, 30)),)),
    ((200, 320), (20, 60, 30), (("rectangle", (30, 60, 160, 220), (250, 220, 40)),)),
    ((256, 256), (90, 140, 220), (("polygon", (128, 30, 220, 220, 36, 220), (90, 60, 20)),)),
    (
        (400, 300),
        (255, 255, 255),
        tuple(
            ("rectangle", (30, 30 + 25 * row, 340 - 13 * row, 42 + 25 * row), (40, 40, 40))
            for row in range(9)
        ),
    ),
)


def drawn() -> list[bytes]:
    """Four PNG files: a disc, a door, a mountain, a page.  Raises `DependencyConflict` without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DependencyConflict(
            f"verify needs the package pillow for this model: {extras.needed('vision')}"
        ) from error
    files = []
    for size, background, shapes in _SCENES:
        picture = Image.new("RGB", size, background)
        canvas: Any = ImageDraw.Draw(picture)
        for shape, box, colour in shapes:
            getattr(canvas, shape)(box, fill=colour)
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        files.append(stream.getvalue())
    return files


def opened(files: list[bytes]) -> list[Any]:
    """The same as Pillow's RGB images."""
    from PIL import Image

    return [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
