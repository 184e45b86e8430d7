"""Encodes text with a model's tokenizer, without blocking the event loop for long.

`Tokenizer.encode` holds the GIL even in a thread: a 38k-token prompt stopped every stream for about 100 ms, while
`encode_batch` lets go of it (facts 32). So short text is encoded at once, and long text as a batch of one in a thread.

Special tokens written out in a text are encoded as the control tokens they name, anywhere in it. A chat template needs
that for its own markers, and a rendered prompt no longer separates the template's text from a user's. So a user who
types `<|im_end|>` into a message ends the message, as with every server that renders Hugging Face templates to text. If
that matters to a deployment, it must filter messages before they get here.
"""

from __future__ import annotations

import asyncio

from tokenizers import Tokenizer

from holdfast.frontend.text.detokenizer import TokenTable

# Text up to this long is encoded on the loop: about 1,000 tokens, 2 ms at worst. A trip to a thread and back costs
# 0.1-0.2 ms and a wait behind other long prompts.
ENCODE_NOW_CHARS_MAX = 4_000
# If a text has more characters per token of the context than this, its tokens are counted piece by piece before it is
# encoded as a whole: a text that cannot fit is refused early. Most text has 3 to 5 characters per token.
CHARS_A_TOKEN = 4
PIECE_CHARS = 64 * 1024
# What a cut may add to the count: it splits a word into two parts of a few tokens.
CUT_TOKENS = 8


class TooManyTokens(Exception):
    """Raised if a text cannot fit: it has at least `count` tokens."""

    def __init__(self, count: int) -> None:
        super().__init__(f"at least {count} tokens")
        self.count = count


class TextTokenizer:
    """The encoder of one tokenizer.json, with its table for decoding."""

    __slots__ = ("_tokenizer", "special_ids", "table", "vocab_size")

    def __init__(self, json_bytes: bytes) -> None:
        """Read a tokenizer.json; raise ValueError if it is wrong."""
        try:
            self._tokenizer = Tokenizer.from_str(json_bytes.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"tokenizer.json is not UTF-8: {error}") from error
        except Exception as error:  # the binding raises bare Exception, and nothing narrower
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        # A file saved in a training run may truncate or pad every text; a prompt must stay as it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.table = TokenTable(self._tokenizer, json_bytes)
        self.special_ids = self.table.special_ids
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size: int = max(self._tokenizer.get_vocab_size(), max(added, default=-1) + 1)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.vocab_size} tokens, {self.table!r})"

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name, such as the end-of-text marker."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode_now(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode on the event loop; only for text up to ENCODE_NOW_CHARS_MAX."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode(self, text: str, tokens_max: int, *, add_special_tokens: bool = False) -> list[int]:
        """Encode text of any length in a thread. `add_special_tokens`: False for chat, whose template writes its own
        markers; True for completions. Raise TooManyTokens if it is clear early that there are more than `tokens_max`;
        a result may still be slightly longer.

        The thread pool's queue is bounded by what the frontend admits; the pool itself by the loop's default.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._encode_alone, text, tokens_max, add_special_tokens)

    def _encode_alone(self, text: str, tokens_max: int, add_special_tokens: bool) -> list[int]:
        if len(text) > tokens_max * CHARS_A_TOKEN:
            self._refuse_early(text, tokens_max)
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def _refuse_early(self, text: str, tokens_max: int) -> None:
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = self._tokenizer.encode_batch_fast([text[start : start + PIECE_CHARS]], add_special_tokens=False)[0]
            count += max(0, len(piece) - CUT_TOKENS)
            if count > tokens_max:
                raise TooManyTokens(count)
