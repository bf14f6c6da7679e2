"""Numbers with what they count."""

from kvatlas.cli.counted import counted


def test_one_is_no_plural_and_thousands_are_set_apart() -> None:
    assert [counted(number, "page") for number in (0, 1, 2, 12345)] == [
        "0 pages",
        "1 page",
        "2 pages",
        "12,345 pages",
    ]
