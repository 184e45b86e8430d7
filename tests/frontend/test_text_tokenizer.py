"""Encoding gives the same ids on the loop and off it, and a long prompt does not stop the loop."""

from __future__ import annotations

import asyncio
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from holdfast.frontend.text.tokenizer import ENCODE_NOW_CHARS_MAX, TextTokenizer, TooManyTokens

ROOM = 1_000_000  # tokens; more than any text here has


def trained() -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([words(2_000)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(16)
    text: str = tokenizer.to_str()
    return text.encode()


def words(count: int) -> str:
    source = random.Random(7)
    return " ".join("".join(source.choices("abcdefghijkl", k=source.randint(2, 8))) for _ in range(count))


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(trained())


async def test_long_text_gives_the_same_ids(tokenizer: TextTokenizer) -> None:
    """The way through a thread changes nothing, and a truncation left in the file does not apply."""
    text = words(3_000)
    assert len(text) > ENCODE_NOW_CHARS_MAX
    ids = await tokenizer.encode(text, ROOM)
    assert ids == tokenizer.encode_now(text)
    detokenizer = tokenizer.table.detokenizer()
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


async def test_special_tokens_are_added_only_on_request(tokenizer: TextTokenizer) -> None:
    """Completions begin with the model's own marker; chat prompts bring theirs."""
    plain = await tokenizer.encode("abc", ROOM)
    assert await tokenizer.encode("abc", ROOM, add_special_tokens=True) == [tokenizer.token_id("<s>"), *plain]
    assert tokenizer.token_id("<|end|>") in await tokenizer.encode("abc<|end|>", ROOM)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.vocab_size == 400


async def test_a_long_prompt_leaves_the_loop_running(tokenizer: TextTokenizer) -> None:
    """While a prompt of 30,000 tokens is encoded the loop gets its turn far more often than once.

    The share of the wait that the longest gap takes tells a held GIL (all of it) from a free one, on any machine.
    """
    text = words(12_000)
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(tokenizer.encode(text, ROOM))
    gaps = []
    while not task.done():
        before = loop.time()
        await asyncio.sleep(0)
        gaps.append(loop.time() - before)
    assert len(task.result()) >= 30_000
    assert max(gaps) < sum(gaps) / 2


async def test_a_text_that_cannot_fit_is_told_so_after_a_part_of_it(tokenizer: TextTokenizer) -> None:
    """What is far too long is counted only until that is clear; what just fits, however little a token holds, is not
    refused."""
    text = words(50_000)
    whole = len(tokenizer.encode_now(text))
    with pytest.raises(TooManyTokens) as refused:
        await tokenizer.encode(text, 1_000)
    assert 1_000 < refused.value.count < whole / 2
    assert len(await tokenizer.encode(text, whole)) == whole
    spaces = "<|end|>" * 30_000  # seven characters a token
    assert len(await tokenizer.encode(spaces, 30_000)) == 30_000


@pytest.mark.parametrize("bad", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_broken_file_is_a_value_error(bad: bytes) -> None:
    """What is no tokenizer.json is said so, in one kind of error."""
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextTokenizer(bad)
