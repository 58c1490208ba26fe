"""The sentences from which the tiny tokenizers are made and with which the tiny models are tested."""

from __future__ import annotations

_PEOPLE = (
    "Marie",
    "Curie",
    "Alan",
    "Turing",
    "Ada",
    "Lovelace",
    "Grace",
    "Hopper",
    "Nikola",
    "Tesla",
    "Rosa",
    "Parks",
)
_PLACES = (
    "Paris",
    "Berlin",
    "London",
    "Tokyo",
    "Nairobi",
    "Lima",
    "Toronto",
    "Warsaw",
    "Cairo",
    "Sydney",
    "Oslo",
)
_THINGS = (
    "river",
    "mountain",
    "battery",
    "engine",
    "violin",
    "bridge",
    "kitchen",
    "library",
    "garden",
    "camera",
    "rocket",
)
_VERBS = (
    "built",
    "sold",
    "visited",
    "repaired",
    "painted",
    "measured",
    "described",
    "opened",
    "found",
    "wrote",
)
_PATTERNS = (
    "{person} {verb} the {thing} in {place}.",
    "What is the capital of France and where is {place}?",
    "How do I repair a {thing}? {person} {verb} one in {place}.",
    "Le chat dort sur la fenêtre à {place}.",
    "Der Hund läuft über die Brücke in {place}.",
    "東京は日本の首都です。{place}",
    "Represent this sentence for searching relevant passages: query {thing}",
    "Instruct: given a web search query, retrieve passages that answer it\nQuery: {place} {verb}",
)


def sentences() -> list[str]:
    """About 500 sentences in a fixed order."""
    made = []
    for turn in range(64):
        for index, pattern in enumerate(_PATTERNS):
            step = turn * len(_PATTERNS) + index
            made.append(
                pattern.format(
                    person=_PEOPLE[step * 7 % len(_PEOPLE)],
                    place=_PLACES[(step * 3 + turn) % len(_PLACES)],
                    thing=_THINGS[(step + turn) % len(_THINGS)],
                    verb=_VERBS[step * 7 % len(_VERBS)],
                )
            )
    return made


def mixed_lengths() -> list[str]:
    """Eleven texts of very different lengths, some of them equally long, one empty."""
    stock = sentences()
    return [
        stock[0],
        "river",
        "bridge",
        " ".join(stock[:12]),
        "",
        stock[3],
        stock[5],
        "camera",
        " ".join(stock[20:23]),
        " ".join(stock[30:38]),
        stock[9],
    ]
