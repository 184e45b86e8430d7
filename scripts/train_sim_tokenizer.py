"""Train the sim engine's tokenizer: a byte-level BPE over a seeded corpus of plain English.

Always true of what it writes: the corpus is ASCII only, so every CJK character, emoji or accented letter is spelled in
single-byte tokens; the three special tokens have the ids 0, 1 and 2; the same Python gives the same files. The words
come from the docstrings of Python's standard library, so that it runs anywhere; the result is kept in the package
because another Python version has other docstrings.

    python scripts/train_sim_tokenizer.py            # writes src/holdfast/engines/sim/data/
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY_SIZE = 6144
WORDS_MAX = 3200  # leaves room for the pieces from which the words are merged
SENTENCES = 40_000
BYTES_MAX = 1_000_000  # the asset travels in the wheel and through the store
SEED = 20_240_601
DATA = Path(__file__).resolve().parent.parent / "src/holdfast/engines/sim/data"

# What a word must look like to be said: lower case, with a vowel, no run of four consonants at its start.
WORD = re.compile(r"(?<![\w.'/\\-])[a-z]{2,13}(?![\w'(/\\=-]|\.\w)")
VOWEL = re.compile(r"[aeiouy]")
CLUSTER = re.compile(r"^[bcdfghjklmnpqrstvwxz]{4}|(.)\1\1")

# Everyday words that docstrings seldom use; streams read better with them.
OWN_WORDS = """
river mountain forest ocean island valley harbour bridge garden window kitchen morning evening winter summer autumn
spring thunder lightning rain snow wind cloud star moon sun light shadow stone glass iron silver gold copper wood
paper letter story song music dance colour red green blue yellow white black brown grey bird horse dog cat fish whale
wolf bear fox deer tree leaf flower grass seed root bread butter cheese apple orange lemon honey sugar salt pepper
water coffee tea milk wine soup rice market street village city country road train ship boat engine wheel rope sail
anchor kelp storm tide wave shore sand shell coral rock mother father sister brother child friend neighbour teacher
doctor sailor farmer baker painter singer king queen brave quiet gentle bright dark warm cold deep tall small old
young happy sad angry calm strong weak quick slow early late near far walk run swim climb carry build break mend
listen speak whisper laugh cry sleep dream wake remember forget follow lead gather share hold grow shine drift
"""

TEMPLATES = [
    "The {} {} is {} by the {} {}.",
    "When {} and {} are {}, the {} can {}.",
    "A {} of {} {} with {} and {}!",
    "Is {} {} or {} {}? It is {}, {} and {}.",
    "{}: {}, {}; {} -- {} ({} {}).\n",
    "I said: {} {} {}. You said: {} {}.\n\n",
    "user: {} {} {}\nassistant: {} {} {}",
    "We {} {} from {} to {} in 2024, 12 times, 3.5 per {}.",
    '"{} {}," they {}, "{} {} {}."',
    "1. {} {}\n2. {} {}\n3. {} {}\n",
]


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """(module, docstring) of every module, class and function of the standard library's top level."""
    for path in sorted(root.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text.isascii():
                    yield path.stem, text


def words_of(texts: list[tuple[str, str]]) -> list[str]:
    """The words to speak, most used first; a word counts once per module, so that jargon of one module stays out."""
    modules: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for module, text in texts:
        for word in WORD.findall(text):
            if (module, word) not in seen and VOWEL.search(word) and not CLUSTER.search(word):
                seen.add((module, word))
                modules[word] += 1
    own = sorted(set(OWN_WORDS.split()))
    common = [word for word, count in sorted(modules.items(), key=lambda item: (-item[1], item[0])) if count >= 2]
    return (own + [word for word in common if word not in set(own)])[:WORDS_MAX]


def corpus(words: list[str], rng: random.Random) -> Iterator[str]:
    """Sentences from the templates. Words are drawn evenly, so that each becomes one token."""
    for _ in range(SENTENCES):
        template = rng.choice(TEMPLATES)
        chosen = rng.choices(words, k=template.count("{}"))
        if rng.random() < 0.15:
            chosen[0] = chosen[0].capitalize()
        yield template.format(*chosen)


def train(sentences: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="where tokenizer.json and words.txt go")
    out: Path = parser.parse_args().out
    words = words_of(list(docstrings(Path(sysconfig.get_path("stdlib")))))
    tokenizer = train(corpus(words, random.Random(SEED)))
    spoken = [word for word in words if len(tokenizer.encode(" " + word).ids) == 1]
    text = tokenizer.to_str()
    size_bytes = len(text.encode())
    assert size_bytes <= BYTES_MAX, f"{size_bytes} bytes"
    assert tokenizer.get_vocab_size() >= 4096, tokenizer.get_vocab_size()
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    (out / "words.txt").write_text("\n".join(spoken) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens, {size_bytes} bytes, {len(spoken)} of {len(words)} words are one token")


if __name__ == "__main__":
    main()
