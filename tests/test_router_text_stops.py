"""Stop strings are found wherever the text is cut, and nobody sees a part of one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stops import StopStrings


def feed(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        passed = stops.feed(piece)
        shown += passed.text
        if passed.stop is not None:
            return shown, passed.stop
    return shown + stops.finish(), None


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in zip(places, places[1:], strict=False)]


def test_a_stop_string_over_several_pieces_ends_the_text_before_it() -> None:
    assert feed(StopStrings(["</end>"]), ["abc<", "/e", "nd", ">later"]) == ("abc", "</end>")
    assert feed(StopStrings(["</end>"], include_stop=True), ["abc<", "/end>later"]) == ("abc</end>", "</end>")


def test_text_that_only_begins_like_a_stop_string_is_shown_as_soon_as_it_is_none() -> None:
    stops = StopStrings(["aab"])
    assert [stops.feed(piece).text for piece in ("xa", "a", "a", "c")] == ["x", "", "a", "aac"]
    assert stops.finish() == ""


def test_what_is_held_back_at_the_end_is_shown() -> None:
    assert feed(StopStrings(["STOP"]), ["one ST"]) == ("one ST", None)


def test_the_leftmost_stop_string_wins_and_then_the_longest() -> None:
    assert feed(StopStrings(["cd", "b"]), ["abcd"]) == ("a", "b")
    assert feed(StopStrings(["b", "bcd"]), ["abcd"]) == ("a", "bcd")


def test_before_the_minimum_stop_strings_are_ordinary_text() -> None:
    stops = StopStrings(["b"])
    assert stops.skip("abc") == "abc"
    assert stops.feed("abc").stop == "b"


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_where_the_text_is_cut_makes_no_difference_but_to_which_of_two_overlapping_stops_is_seen_first(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    shown, stop = feed(StopStrings(stops, include), cut(text, borders))
    firsts = [text.find(each) for each in stops if each in text]
    assert (stop is None) == (not firsts)
    if stop is None:
        assert shown == text
    else:
        start = len(shown) - (len(stop) if include else 0)
        assert text[start:].startswith(stop) and text.startswith(shown)


@given(st.text("ab", max_size=24), st.text("ab", min_size=1, max_size=5), st.lists(st.integers(0, 30), max_size=6))
@settings(deadline=None, max_examples=200)
def test_one_stop_string_is_found_at_its_first_place_however_the_text_is_cut(
    text: str, stop: str, borders: list[int]
) -> None:
    expected = (text[: text.find(stop)], stop) if stop in text else (text, None)
    assert feed(StopStrings([stop]), cut(text, borders)) == expected
