"""Incremental text equals the tokenizer's own decode, piece by piece, for every kind of decoder."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from holdfast.frontend.text.detokenizer import BYTE_RUN_BYTES_MAX, TokenTable, byte_level_bytes, read_style

BYTE_BASE = 9
UNKNOWN_ID = 5_000


def byte_level() -> Tokenizer:
    """Each byte a token, some words, special and plain added tokens."""
    vocab = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in ("Ġhello", "hello", "ä½", "ðŁĺ", "Ċ", "ĠðŁ"):
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("é"), AddedToken("雪")])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """A small SentencePiece-like vocabulary with all 256 byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", "▁hi", "hi", "▁", "▁▁", "é", "雪"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    vocab.update({f"<0x{byte:02X}>": BYTE_BASE + byte for byte in range(256)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<0xZZ>"), AddedToken(" x y"), AddedToken("<0x+F>")])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "<s>", "▁hi", "there", "▁", "▁▁you", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def table_of(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer, tokenizer.to_str().encode())


BYTE_LEVEL = byte_level()
BYTE_LEVEL_TABLE = table_of(BYTE_LEVEL)
FALLBACKS = [(tokenizer, table_of(tokenizer)) for tokenizer in (byte_fallback(), byte_fallback(strip=False))]
METASPACE = metaspace()
BYTE_IDS = {byte_level_bytes(one)[0]: BYTE_LEVEL.token_to_id(one) for one in pre_tokenizers.ByteLevel.alphabet()}

ids_of_vocab = st.one_of(
    st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), st.just(UNKNOWN_ID), st.sampled_from(list(range(250, 270)))
)
utf8_runs = st.text(min_size=1, max_size=4).map(lambda text: [BYTE_BASE + byte for byte in text.encode()])
fallback_ids = st.lists(
    st.one_of(utf8_runs, st.integers(0, 270).map(lambda one: [one]), st.just([UNKNOWN_ID])), max_size=12
).map(lambda runs: [one for run in runs for one in run])


def pieces_of(table: TokenTable, ids: list[int]) -> list[str]:
    detokenizer = table.detokenizer()
    return [*(detokenizer.push(one) for one in ids), detokenizer.flush()]


def test_styles_are_recognised() -> None:
    """The two table decoders are known by their JSON, and anything else is left to the tokenizer."""
    assert read_style(BYTE_LEVEL.to_str().encode()).kind == "byte_level"
    style = read_style(FALLBACKS[0][0].to_str().encode())
    assert (style.kind, style.replacements, style.strip_first) == ("byte_fallback", (("▁", " "),), " ")
    assert read_style(METASPACE.to_str().encode()).kind == "window"
    assert read_style(b'{"decoder": null}').kind == "window"


@settings(max_examples=300, deadline=None)
@given(st.lists(ids_of_vocab, max_size=40))
def test_byte_level_equals_the_full_decode(ids: list[int]) -> None:
    """Whatever the ids, valid UTF-8 or not, the pieces join to the reference decode."""
    assert "".join(pieces_of(BYTE_LEVEL_TABLE, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(fallback_ids, st.sampled_from(FALLBACKS))
def test_byte_fallback_equals_the_full_decode(ids: list[int], pair: tuple[Tokenizer, TokenTable]) -> None:
    """The same for byte-fallback, where one bad byte spoils its whole run; runs up to the bound are exact."""
    tokenizer, table = pair
    run = longest = 0
    for one in ids:
        run = run + 1 if BYTE_BASE <= one < BYTE_BASE + 256 or one == 267 else (run if one in (0, 1, 2, 5_000) else 0)
        longest = max(longest, run)
    if longest < BYTE_RUN_BYTES_MAX:
        assert "".join(pieces_of(table, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=20))
def test_any_other_decoder_goes_through_the_window(ids: list[int]) -> None:
    """A decoder without a table (here Metaspace, which treats the text's start apart) is exact through the window."""
    table = table_of(METASPACE)
    assert "".join(pieces_of(table, ids)) == METASPACE.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
def test_no_piece_splits_a_character(text: str) -> None:
    """A text spelled in single bytes comes out in whole characters, and nothing is left for the end."""
    pieces = pieces_of(BYTE_LEVEL_TABLE, [BYTE_IDS[byte] for byte in text.encode()])
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == ""


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    """What cannot become a character any more is a replacement character, not lost."""
    detokenizer = BYTE_LEVEL_TABLE.detokenizer()
    assert detokenizer.push(BYTE_LEVEL.token_to_id("ä½")) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_long_byte_run_is_shown_in_parts() -> None:
    """A script spelled wholly in byte tokens is not withheld beyond the bound, and stays exact while it is valid."""
    tokenizer, table = FALLBACKS[0]
    ids = [BYTE_BASE + byte for byte in ("雪が降る" * 20).encode()]
    detokenizer = table.detokenizer()
    shown = 0
    for place, one in enumerate(ids):
        shown += len(detokenizer.push(one).encode())
        assert place + 1 - shown < BYTE_RUN_BYTES_MAX
    assert "".join(pieces_of(table, ids)) == tokenizer.decode(ids)


def test_unknown_and_impossible_ids_add_nothing() -> None:
    """Ids outside the vocabulary, even negative or beyond 32 bits, are no text and are not remembered."""
    for table in (BYTE_LEVEL_TABLE, FALLBACKS[0][1], table_of(METASPACE)):
        seen = len(table.texts)
        assert pieces_of(table, [UNKNOWN_ID, -1, 2**32, 2**70]) == [""] * 5
        assert len(table.texts) == seen


def test_labels_name_special_tokens() -> None:
    """Logprobs show a special token by its name, a part of a character by its bytes."""
    assert BYTE_LEVEL_TABLE.label(BYTE_LEVEL.token_to_id("<|end|>")) == ("<|end|>", b"<|end|>")
    assert BYTE_LEVEL_TABLE.label(BYTE_LEVEL.token_to_id("ä½")) == ("\ufffd", b"\xe4\xbd")
    assert FALLBACKS[0][1].label(3) == (" hi", b" hi")
