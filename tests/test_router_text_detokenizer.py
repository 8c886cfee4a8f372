"""Text comes out of tokens whole: no character is split, none is lost, and chunks and resumes change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from router_front import MERGES, SPECIAL, make_model_dir, make_tokenizer
from tokenizers import decoders, models

from router.text.detokenizer import WINDOW_TOKENS, Detokenizer
from router.text.tokenizer import NoTokenizer, Tokenizer

BYTE_LEVEL = Tokenizer(make_tokenizer())
BYTE_IDS = {BYTE_LEVEL.encode(chr(byte), False)[0]: byte for byte in range(128)}
VOCAB = 256 + len(MERGES) + len(SPECIAL)


def sentencepiece() -> Tokenizer:
    """Llama 2's way: a word begins with ▁, unknown characters are byte tokens, the first space is dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "a", "b", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.step(token_id) for token_id in ids), detokenizer.finish()]


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=150)
def test_every_text_comes_back_from_its_tokens(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, False)
    pieces = run(BYTE_LEVEL.detokenizer(()), ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)
    if not any(special in text for special in SPECIAL):
        assert "".join(pieces) == text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=80), st.lists(st.integers(0, VOCAB - 1), max_size=10))
@settings(deadline=None, max_examples=200)
def test_any_tokens_behind_any_prompt_give_what_decoding_all_of_them_gives(ids: list[int], prompt: list[int]) -> None:
    """Random tokens are mostly bytes that are no character: each becomes U+FFFD, once, and hides nothing."""
    for context in ((), prompt):
        detokenizer = BYTE_LEVEL.detokenizer(context)
        shown = BYTE_LEVEL.decode(context[-6:]).rstrip("\ufffd")
        expected = BYTE_LEVEL.decode([*context[-6:], *ids])[len(shown) :] if ids else ""
        assert "".join(run(detokenizer, ids)) == expected


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60), st.integers(0, 60))
@settings(deadline=None, max_examples=100)
def test_a_resumed_answer_continues_the_text_that_the_client_has(ids: list[int], cut: int) -> None:
    whole, first, resumed = (BYTE_LEVEL.detokenizer((1, 2)) for _ in range(3))
    shown = "".join(first.step(token_id) for token_id in ids[:cut])
    for token_id in ids[:cut]:
        resumed.step(token_id)
    assert shown + "".join(run(resumed, ids[cut:])) == "".join(run(whole, ids))


@given(st.one_of(st.lists(st.integers(0, VOCAB - 1), max_size=60), st.text(max_size=60)), st.lists(st.integers(1, 9)))
@settings(deadline=None, max_examples=200)
def test_tokens_that_come_together_give_what_they_give_one_by_one(given: list[int] | str, sizes: list[int]) -> None:
    ids = BYTE_LEVEL.encode(given, False) if isinstance(given, str) else given
    alone, together = BYTE_LEVEL.detokenizer((1, 2)), BYTE_LEVEL.detokenizer((1, 2))
    for size in [*sizes, 60]:
        part, ids = ids[:size], ids[size:]
        assert together.steps(part) == "".join(map(alone.step, part))
    assert together.finish() == alone.finish()


@pytest.mark.parametrize("character", ["é", "✓", "🎉", "न"])
def test_a_character_appears_with_its_last_byte(character: str) -> None:
    ids = [BYTE_LEVEL.encode(chr(0), False)[0], *make_tokenizer().encode(character).ids]
    if character == "é":
        ids = [ids[0], *(make_tokenizer().token_to_id(piece) for piece in "Ã©")]
    pieces = run(BYTE_LEVEL.detokenizer(()), ids)[1:-1]
    assert pieces == [""] * (len(pieces) - 1) + [character]


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    ids = make_tokenizer().encode("ab🎉").ids[:-1]
    pieces = run(BYTE_LEVEL.detokenizer(()), ids)
    assert "".join(pieces[:-1]) == "ab" and pieces[-1] == "\ufffd"


def test_the_rest_of_a_character_that_the_prompt_began_completes_it() -> None:
    ids = make_tokenizer().encode("x✓y").ids
    assert "".join(run(BYTE_LEVEL.detokenizer(ids[:2]), ids[2:])) == "✓y"


def test_special_tokens_are_hidden_unless_kept() -> None:
    ids = make_tokenizer().encode("a<|im_end|>b").ids
    assert "".join(run(BYTE_LEVEL.detokenizer(()), ids)) == "ab"
    assert "".join(run(BYTE_LEVEL.detokenizer((), keep_special_tokens=True), ids)) == "a<|im_end|>b"


def test_leading_spaces_of_words_survive_in_every_position() -> None:
    llama = sentencepiece()
    ids = [258, 259, 258, 260, 0xC3 + 1, 0xA9 + 1, 259, 262] * 4
    expected = llama.decode(ids)
    assert "".join(run(llama.detokenizer(()), ids)) == expected
    after_prompt = "".join(run(llama.detokenizer([258]), [259, 258]))
    assert after_prompt == " world hello"


def test_the_window_stays_small_whatever_comes() -> None:
    lengths = []
    detokenizer = Detokenizer(lambda ids: lengths.append(len(ids)) or BYTE_LEVEL.decode(ids))
    for token_id in [*range(VOCAB), *[0x80] * 200, *BYTE_LEVEL.encode("hello world " * 30, False)]:
        detokenizer.step(token_id)
    assert max(lengths) <= WINDOW_TOKENS + 4
    detokenizer.steps(BYTE_LEVEL.encode("hello world " * 300, False))
    assert max(lengths) <= 2 * WINDOW_TOKENS


def test_a_directory_without_a_tokenizer_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(NoTokenizer, match=r"no tokenizer\.json; it holds weights\.bin"):
        Tokenizer.load(tmp_path)
    (make_model_dir(tmp_path / "model") / "tokenizer.json").write_text("{")
    with pytest.raises(NoTokenizer, match="cannot be read"):
        Tokenizer.load(tmp_path / "model")
