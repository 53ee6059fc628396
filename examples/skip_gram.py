"""Word vectors by skip-gram with negative samples: a table of rows, of which each step needs few.

    weft run -n 2 examples/skip_gram.py          or alone: python examples/skip_gram.py

The text is generated: each sentence has a topic, from whose words most of its words come. Ranks
read different sentences, and get and add only the rows of the words in their batch. Words of a
topic stand near the same words, so they must come out near each other: rank 0 prints how many of
the words that are nearest to a word are of its topic, which must be over 0.9.
"""

import numpy as np

import weft

TOPICS, WORDS_PER_TOPIC, FILLERS = 20, 10, 50
VOCABULARY, DIMENSIONS = TOPICS * WORDS_PER_TOPIC + FILLERS, 16
SENTENCES, LENGTH, WINDOW = 6000, 10, 2
BATCH, NEGATIVES, RATE = 512, 5, 0.1

weft.init()
generator = np.random.default_rng(weft.rank())


def write_text(sentences: int) -> np.ndarray:
    """Sentences as rows of word numbers: topic 0's words first, fillers last."""
    topics = generator.integers(TOPICS, size=(sentences, 1))
    words = topics * WORDS_PER_TOPIC + generator.integers(WORDS_PER_TOPIC, size=(sentences, LENGTH))
    fillers = generator.integers(TOPICS * WORDS_PER_TOPIC, VOCABULARY, size=words.shape)
    return np.where(generator.random(words.shape) < 0.3, fillers, words)


def pairs_of(text: np.ndarray) -> np.ndarray:
    """Each word with each that stands within the window, in random order."""
    near = [
        np.stack([text[:, first], text[:, second]], axis=-1)
        for first in range(LENGTH)
        for second in range(max(0, first - WINDOW), min(LENGTH, first + WINDOW + 1))
        if first != second
    ]
    return generator.permutation(np.concatenate(near))


start = (np.random.default_rng(0).random((VOCABULARY, DIMENSIONS)) - 0.5) / DIMENSIONS
vectors = weft.MatrixTable(start)
contexts = weft.MatrixTable(VOCABULARY, DIMENSIONS)

pairs = pairs_of(write_text(SENTENCES // weft.size()))
for begin in range(0, len(pairs), BATCH):
    words, near = pairs[begin : begin + BATCH].T
    # which context is real: the first of each row, the others are drawn
    candidates = generator.integers(VOCABULARY, size=(len(words), 1 + NEGATIVES))
    candidates[:, 0] = near
    real = np.arange(1 + NEGATIVES) == 0

    word_rows = vectors.get(words)
    context_rows = contexts.get(candidates.reshape(-1)).reshape(*candidates.shape, DIMENSIONS)
    scores = np.einsum("wd,wcd->wc", word_rows, context_rows)
    errors = RATE * (real - 1 / (1 + np.exp(-scores)))
    # a word that stands in several rows gets the sum of their changes
    vectors.add(np.einsum("wc,wcd->wd", errors, context_rows), words)
    changes = errors[:, :, None] * word_rows[:, None, :]
    contexts.add(changes.reshape(-1, DIMENSIONS), candidates.reshape(-1))

weft.barrier()
found = vectors.get(np.arange(TOPICS * WORDS_PER_TOPIC))
found /= np.linalg.norm(found, axis=1, keepdims=True)
likeness = found @ found.T
np.fill_diagonal(likeness, -1)
nearest = np.argsort(-likeness, axis=1)[:, :5]
own = np.arange(len(found))[:, None] // WORDS_PER_TOPIC
related = np.mean(nearest // WORDS_PER_TOPIC == own)
if weft.is_master():
    print(f"{weft.size()} workers: {related:.3f} of the nearest words are of the same topic")
assert related > 0.9, related
