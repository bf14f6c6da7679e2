"""Numbers with what they count, for people."""


def counted(number: int, noun: str) -> str:
    """`0 pages`, `1 page`, `2,000 pages`; nouns whose plural is an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
